"""Convert objects to leaves and load leaves back into objects, without storage."""
