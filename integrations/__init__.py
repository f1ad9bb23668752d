"""Checkpoints of torchrelay for the trainers of other libraries; each needs the library of its name."""
