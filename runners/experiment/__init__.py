"""A user's program with its verbs: train, test, eval, server, status, amend, and the runs that they make."""
