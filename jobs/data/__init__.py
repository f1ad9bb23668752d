"""Readers and loaders with reproducible order, and fetching of batches."""
