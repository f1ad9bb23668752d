"""A model made again from what a run has archived, or by a function that the user names."""
