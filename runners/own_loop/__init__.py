"""Training loops that the program writes itself, with all that a job has."""
