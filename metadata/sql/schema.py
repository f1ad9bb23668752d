"""Makes the tables at the first use, and refuses those of another version."""

from __future__ import annotations

from sqlalchemy import Connection, insert, inspect, select, text

from torchrelay.errors import FormatError
from torchrelay.metadata.sql.tables import CURRENT_EPOCHS, SCHEMA, VERSION, metadata

_LOCK = 0x746F7263_68726C79
"""Ours alone among the advisory locks of a PostgreSQL database, we hope: the letters of our name."""


def has_tables(connection: Connection, where: str) -> bool:
    """Whether our tables are there; FormatError, naming the place and both versions, for others' version."""
    if not inspect(connection).has_table(SCHEMA.name):
        return False
    versions = sorted(connection.execute(select(SCHEMA.c.version)).scalars())
    if versions == [VERSION]:
        return True
    found = ", ".join(map(str, versions)) or "none"
    raise FormatError(
        f"the database {where} has tables of schema version {found} in {SCHEMA.name}, this torchrelay writes "
        f"version {VERSION}: use the torchrelay that made them, or give another database and fill it with "
        "torchrelay index"
    )


def make_tables(connection: Connection, where: str) -> None:
    """Make what is missing, in the transaction that is open; two who come at once wait for each other."""
    if has_tables(connection, where):
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if has_tables(connection, where):
            return
    metadata.create_all(connection)
    connection.execute(text(CURRENT_EPOCHS))
    connection.execute(insert(SCHEMA).values(version=VERSION))
