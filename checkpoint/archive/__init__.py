"""Keep the former place of state archives, now in `torchrelay.models.archive`."""
