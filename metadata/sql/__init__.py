"""What jobs tell, in a database: an index over many runs, which is made again from their directories.

Nothing here imports SQLAlchemy before a database is named.
"""
