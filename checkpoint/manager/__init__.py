"""Provide the managers of checkpoints, and the engine behind them."""
