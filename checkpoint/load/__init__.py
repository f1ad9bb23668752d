"""Loads: an epoch is opened, verified, and read into objects, with a job or without."""
