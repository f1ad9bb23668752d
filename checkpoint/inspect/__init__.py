"""Epochs without torch: what they hold, what changed between two, where it went bad, what can be repaired."""
