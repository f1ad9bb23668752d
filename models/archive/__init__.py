"""State archives: states and plain values in one zip file that zipfile and json alone can read."""
