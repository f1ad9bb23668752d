"""What people see of runs: lines, bars, tables, logs of ranks, trackers, and how a run stands."""
