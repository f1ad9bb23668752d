"""Many processes: the launcher's store, agreement, the watcher, process groups."""
