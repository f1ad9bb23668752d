"""A job through its life: where it starts, its epochs and saves, how it ends and what it leaves."""
