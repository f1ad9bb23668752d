"""Measurements of torchrelay beside other checkpoint engines."""
