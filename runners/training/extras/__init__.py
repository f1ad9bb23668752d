"""What most runs do not have, and what is imported only where a run uses it."""
