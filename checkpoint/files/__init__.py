"""Files that stand alone: blob files, and other formats."""
