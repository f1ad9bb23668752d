"""What `torchrelay VERB` does, without torch."""
