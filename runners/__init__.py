"""Who executes: sessions, the job runner, agreement between ranks, the watcher, the command line."""
