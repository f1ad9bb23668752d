"""Subcommands that read runs: lists, details, comparisons, pages and the database."""
