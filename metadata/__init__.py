"""Run metadata: handlers, run directories, status, statistics, metrics."""
