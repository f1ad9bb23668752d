"""Execution of jobs: sessions, training runs, agreement between ranks, failure detection, subcommands."""
