"""What is remembered: metadata handlers, run directories, status, statistics, metrics."""
