"""Put a local directory before the remote storage: commit locally, upload in the background."""
