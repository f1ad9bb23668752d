"""Use the log and retention together in all processes of a run."""
