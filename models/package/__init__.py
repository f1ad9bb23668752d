"""Model packages: one file with a model that runs without its source code."""
