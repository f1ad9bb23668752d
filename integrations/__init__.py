"""Checkpoints for the trainers of other libraries; each module needs the library of its name."""
