"""Leaves of modules, optimizers and trees."""
