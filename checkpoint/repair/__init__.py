"""Looking back and putting in order: why an epoch is not used, what is derived, what nothing refers to."""
