"""Saves: capture, plan, write, commit; which leaves need no new bytes."""
