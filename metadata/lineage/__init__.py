"""The runs that a run was built on, kept in its own directory."""
