"""What the struck processes run: their nursery, the built-in target, a store that fails, the C library."""
