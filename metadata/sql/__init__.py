"""Metadata in a database: an index of many runs, which can be rebuilt from their directories.

Nothing here imports SQLAlchemy before a database is named.
"""
