"""Read and write standalone files: blob files, and other formats."""
