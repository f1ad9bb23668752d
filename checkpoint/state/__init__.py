"""Objects to leaves and leaves back into objects, without storage."""
