"""Experiments of programs and configurations: their subcommands, and the runs that these create and use."""
