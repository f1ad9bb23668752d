"""Verbs that look into checkpoints, compare and mark them, put them in order."""
