"""Configuration: one schema of keys, read from YAML with the place of every value. Needs no torch."""
