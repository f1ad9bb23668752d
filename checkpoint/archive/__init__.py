"""The former place of state archives, which lie in `torchrelay.models.archive`."""
