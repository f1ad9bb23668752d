"""The sections of a page, each drawn from what was gathered."""
