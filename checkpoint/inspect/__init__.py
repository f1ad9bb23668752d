"""Inspect epochs without torch: contents, differences, anomalies, repair."""
