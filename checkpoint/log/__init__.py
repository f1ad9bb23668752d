"""Store which epochs exist: records, branches, takeover, fencing, thinning, retention."""
