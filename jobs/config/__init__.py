"""Configuration files: YAML with one schema, and the location of every value. Imports no torch."""
