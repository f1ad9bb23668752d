"""Where the pytest plug-in was; the harness is `torchrelay.chaos`."""
