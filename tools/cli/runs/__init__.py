"""Verbs that look at runs: lists, one run, comparisons, pages, the database."""
