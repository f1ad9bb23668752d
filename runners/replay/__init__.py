"""Calls of modules that a run records, and plays again later on the model rebuilt from its archives."""
