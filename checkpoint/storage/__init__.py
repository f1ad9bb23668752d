"""Read and write every byte of a checkpoint: local directories and remote stores."""
