"""torchrelay: a training job as a relay race of epochs."""
