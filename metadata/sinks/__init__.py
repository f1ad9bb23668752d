"""Where metrics go beside the run's own files: one sink per tracker, behind four methods."""
