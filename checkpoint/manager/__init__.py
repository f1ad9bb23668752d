"""Managers of checkpoints, and the engine that they are faces of."""
