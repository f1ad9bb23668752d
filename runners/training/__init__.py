"""Training runs: start position, epochs and saves, stop and exit."""
