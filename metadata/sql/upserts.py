"""The statements that put rows into tables, for both kinds of database, by the rules of `rows`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, and_, case, or_
from sqlalchemy.dialects import postgresql, sqlite

from torchrelay.metadata.sql import tables
from torchrelay.metadata.sql.rows import MERGES, Rows


def put(connection: Connection, rows: Rows) -> None:
    """Insert rows, or merge them with those of the same keys.

    Sorted, so that two jobs that write the same rows wait for each other in one order and never in a circle.
    """
    for name, content in rows.items():
        if content:
            table = tables.metadata.tables[name]
            keys = [column.name for column in table.primary_key]
            in_order = sorted(content, key=lambda row: [row[key] for key in keys])
            connection.execute(_statement(connection.dialect.name, table), in_order)


def _statement(dialect: str, table: Table) -> Any:
    insert: Any = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    new = insert.excluded
    together = table.name == "relay_jobs"
    changes = {
        name: _of_newest(table, new, name, choose) if together else _merged(table.c[name], new[name], choose)
        for name, choose in MERGES[table.name].items()
    }
    keys = [column.name for column in table.primary_key]
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)


def _merged(old: Any, new: Any, choose: Any) -> Any:
    """The least or the greatest of two values that may be missing."""
    wins = new < old if choose is min else new > old
    return case((or_(old.is_(None), wins), new), else_=old)


def _of_newest(table: Table, new: Any, name: str, choose: Any) -> Any:
    """The value of the row with the newer generation; of equal ones as for all other columns."""
    same = new.generation == table.c.generation
    wins = or_(new.generation > table.c.generation, and_(same, new[name] > table.c[name]))
    return case((wins, new[name]), else_=table.c[name])
