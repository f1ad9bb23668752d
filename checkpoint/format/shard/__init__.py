"""Shard files: entries, header, reads and writes."""
