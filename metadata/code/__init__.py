"""Source code of runs: selection, archives, comparison, extraction and import."""
