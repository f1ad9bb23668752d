"""The verbs of programs, for a configuration: each training one a run of its own, with its history."""
