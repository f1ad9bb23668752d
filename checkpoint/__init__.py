"""How state persists: shard files, manifests, the log, proof, planning, loading, managers."""
