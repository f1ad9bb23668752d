"""The `torchrelay` command line; imports no torch."""
