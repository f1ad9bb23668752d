"""Data in order: readers, loaders, and how batches are fetched."""
