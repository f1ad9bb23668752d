"""Verbs that run something: programs, configurations, launches, a server."""
