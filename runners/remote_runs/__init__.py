"""Remote runs: local work, background uploads, and reading from anywhere."""
