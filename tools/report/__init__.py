"""A page about runs: what is gathered from a run directory, and how it is drawn. Without torch."""
