"""Saves behind the training: what may be copied late, where to, who waits, and what became of it."""
