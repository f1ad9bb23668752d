"""Metric sinks: adapters for experiment trackers."""
