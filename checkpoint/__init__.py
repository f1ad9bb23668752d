"""Persist state: shard files, manifests, the log, saves, loads, verification, managers."""
