"""The log and retention as the processes of a run use them together."""
