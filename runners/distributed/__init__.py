"""Communication between processes: rendezvous, agreement, failure detection and process groups."""
