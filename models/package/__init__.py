"""Model packages: one file from which a model runs without the code that trained it."""
