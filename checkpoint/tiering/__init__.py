"""A local place before the remote one: saves are acknowledged locally and uploaded in the background."""
