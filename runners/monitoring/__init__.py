"""Views of runs: console lines, progress bars, tables, logs of ranks, trackers, and the state of a run."""
