"""Checkpoints of torchrelay for the trainers of other libraries; each module needs the extra of its name."""
