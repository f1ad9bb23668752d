"""Database tables, described in docs/metadata.md, and access with a connection per call.

Two rows with the same key are merged: `MERGES` has the rule per column, smallest or largest value; the
columns of a job follow its newest generation. An incompatible change increases VERSION. Errors of drivers
become StorageError with the URL, without its password.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from torchrelay.errors import FormatError, StorageError
from torchrelay.metadata.handlers import EPOCH, HandlerEvent
from torchrelay.metadata.sql.handler import masked, secrets_of, without

Row = dict[str, Any]
MERGES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "relay_jobs": {"name": max, "prefix": max, "generation": max},
    "relay_branches": {"base": max},
    "relay_epochs": {"branch": max, "nodes": max, "saved_at": min},
    "relay_moved": {"bytes": max},
    "relay_durations": {"secs": max},
}
"""Merge rules of the columns that are not part of a key."""


def _rows_of(note: HandlerEvent) -> Iterable[tuple[str, Row]]:
    holder = note.holder
    job, generation, epoch = holder.uuid, holder.generation, note.epoch
    yield "relay_jobs", {"job": job, "name": holder.name, "prefix": note.prefix, "generation": generation}
    yield "relay_branches", {"job": job, "branch": holder.branch, "base": holder.base}
    if note.kind == EPOCH:
        at = datetime.fromtimestamp(note.time, timezone.utc)
        row = {"job": job, "epoch": epoch, "generation": generation}
        yield "relay_epochs", {**row, "branch": holder.branch, "nodes": note.nodes, "saved_at": at}
        return
    for times in note.times:
        row = {"job": job, "epoch": epoch, "generation": generation, "action": note.kind, "node": times.node}
        yield "relay_moved", {**row, "bytes": times.bytes}
        for phase, secs in times.secs.items():
            yield "relay_durations", {**row, "phase": phase, "secs": secs}


VERSION = 1
metadata = sa.MetaData()


def _table(name: str, key: Mapping[str, Any], columns: Mapping[str, Any], *optional: str) -> sa.Table:
    """Define a table; columns are not null unless they are `optional`."""
    keys = [sa.Column(one, kind, primary_key=True, autoincrement=False) for one, kind in key.items()]
    others = [sa.Column(one, kind, nullable=one in optional) for one, kind in columns.items()]
    return sa.Table(name, metadata, *keys, *others)


_TEXT, _COUNT = sa.String, sa.BigInteger
_EPOCH = {"job": _TEXT, "epoch": _COUNT, "generation": _COUNT}
_NODE = {**_EPOCH, "action": _TEXT, "node": _TEXT}
SCHEMA = _table("relay_schema", {"version": _COUNT}, {})
JOBS = _table("relay_jobs", {"job": _TEXT}, {"name": _TEXT, "prefix": _TEXT, "generation": _COUNT})
BRANCHES = _table("relay_branches", {"job": _TEXT, "branch": _COUNT}, {"base": _COUNT}, "base")
EPOCHS = _table(
    "relay_epochs", _EPOCH, {"branch": _COUNT, "nodes": _COUNT, "saved_at": sa.DateTime(timezone=True)}
)
MOVED = _table("relay_moved", _NODE, {"bytes": _COUNT})
DURATIONS = _table("relay_durations", {**_NODE, "phase": _TEXT}, {"secs": sa.Double})
CURRENT_EPOCHS = """
CREATE VIEW relay_current_epochs AS
SELECT e.job, e.epoch, MAX(e.generation) AS generation, MAX(e.branch) AS branch, MAX(e.nodes) AS nodes,
       MIN(e.saved_at) AS saved_at
FROM relay_epochs e
WHERE NOT EXISTS (
  SELECT 1 FROM relay_branches b
  WHERE b.job = e.job AND b.branch > e.branch AND (b.base IS NULL OR b.base < e.epoch)
)
GROUP BY e.job, e.epoch
"""
"""View of current epochs, without those abandoned by a later branch."""


_LOCK = 0x746F7263_68726C79
"""Key of the advisory lock in PostgreSQL, from the letters of the project's name."""


def has_tables(connection: sa.Connection, where: str) -> bool:
    """Return True if the tables exist; raises FormatError for another version of the schema."""
    if not sa.inspect(connection).has_table(SCHEMA.name):
        return False
    versions = sorted(connection.execute(sa.select(SCHEMA.c.version)).scalars())
    if versions == [VERSION]:
        return True
    found = ", ".join(map(str, versions)) or "none"
    raise FormatError(
        f"the database {where} has tables of schema version {found} in {SCHEMA.name}, but this torchrelay "
        f"writes version {VERSION}: use another database and fill it with torchrelay runs index"
    )


def make_tables(connection: sa.Connection, where: str) -> None:
    """Create missing tables in the open transaction; concurrent calls wait for each other."""
    if has_tables(connection, where):
        return
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if has_tables(connection, where):
            return
    metadata.create_all(connection)
    connection.execute(sa.text(CURRENT_EPOCHS))
    connection.execute(sa.insert(SCHEMA).values(version=VERSION))


def put(connection: sa.Connection, notes: Iterable[HandlerEvent]) -> None:
    """Insert the rows of events, or merge them with existing ones; sorted, so that jobs do not deadlock."""
    rows: dict[str, dict[tuple[Any, ...], Row]] = {name: {} for name in MERGES}
    for note in notes:
        for name, row in _rows_of(note):
            rows[name][tuple(row.values())] = row
    for name, content in rows.items():
        if content:
            table = metadata.tables[name]
            keys = [column.name for column in table.primary_key]
            in_order = sorted(content.values(), key=lambda row: [row[key] for key in keys])
            connection.execute(_statement(connection.dialect.name, table), in_order)


def _statement(dialect: str, table: sa.Table) -> Any:
    insert: Any = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    new = insert.excluded
    changes = {}
    for name, choose in MERGES[table.name].items():
        old = table.c[name]
        wins = new[name] < old if choose is min else new[name] > old
        if table.name == "relay_jobs":  # all follow the newer generation
            generation = table.c.generation
            wins = sa.or_(new.generation > generation, sa.and_(new.generation == generation, wins))
        else:
            wins = sa.or_(old.is_(None), wins)
        changes[name] = sa.case((wins, new[name]), else_=old)
    keys = [column.name for column in table.primary_key]
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)


Result = TypeVar("Result")
_FIRST_PAUSE_SECS = 0.05
_LONGEST_PAUSE_SECS = 0.5
_PASSING = ("database system is", "terminating connection", "too many", "remaining connection slots")
_REMEDIES = {
    "not a database": "; move the file away and fill a new one with torchrelay runs index",
    "malformed": "; move the file away and fill a new one with torchrelay runs index",
    "unable to open": "; its folder must exist, and file and folder must be writable",
    "readonly": "; file and folder must be writable",
}


class Database:
    """Stores and reads events; `deadline_secs` limits each step, as far as the driver supports it."""

    def __init__(self, url: sa.URL, deadline_secs: float) -> None:
        self.shown = masked(url)
        self.deadline_secs = deadline_secs
        self._secrets = secrets_of(url)
        self._engine = _engine(url, deadline_secs)

    def store(self, notes: Iterable[HandlerEvent]) -> None:
        """Store events in one transaction, creating missing tables."""
        with self._transaction() as connection:
            make_tables(connection, self.shown)
            put(connection, notes)

    def known(self, uuid: str) -> set[tuple[int, int, str]]:
        """Return the keys of the stored events of a job; see `HandlerEvent.key`."""
        epochs, moved = EPOCHS.c, MOVED.c
        saved = sa.select(epochs.generation, epochs.epoch).where(epochs.job == uuid)
        timed = sa.select(moved.generation, moved.epoch, moved.action).where(moved.job == uuid).distinct()
        found = {(generation, epoch, EPOCH) for generation, epoch in self._read(saved)}
        return found | {(generation, epoch, action) for generation, epoch, action in self._read(timed)}

    def newest_epoch(self, *, uuid: str | None, prefix: str) -> int | None:
        """Return the newest current epoch of a job, or of the last job seen at a prefix."""
        if uuid is None:
            jobs, epochs = JOBS.c, EPOCHS.c
            seen = sa.func.max(epochs.saved_at).desc()
            of_prefix = sa.select(jobs.job).join(EPOCHS, epochs.job == jobs.job)
            of_prefix = of_prefix.where(jobs.prefix == prefix).group_by(jobs.job).order_by(seen)
            found = self._read(of_prefix.limit(1))
            if not found:
                return None
            uuid = found[0][0]
        current = sa.text("SELECT MAX(epoch) FROM relay_current_epochs WHERE job = :job").bindparams(job=uuid)
        rows = self._read(current)
        return None if not rows or rows[0][0] is None else int(rows[0][0])

    def _read(self, query: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query; empty if the tables do not exist."""
        with self._transaction() as connection:
            if not has_tables(connection, self.shown):
                return []
            return [tuple(row) for row in connection.execute(query)]

    def patiently(self, call: Callable[[], Result], patience_secs: float) -> Result:
        """Retry a call for some seconds if waiting may help, as when a server restarts."""
        end, pause = time.monotonic() + patience_secs, _FIRST_PAUSE_SECS
        while True:
            try:
                return call()
            except StorageError as error:
                left = end - time.monotonic()
                if left <= 0 or not _may_pass(error):
                    raise
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection, connection.begin():
                if connection.dialect.name == "postgresql":
                    limit = max(1, int(1000 * self.deadline_secs))
                    connection.execute(sa.text(f"SET LOCAL statement_timeout = {limit}"))
                yield connection
        except (SQLAlchemyError, OverflowError, UnicodeError) as error:
            raise self._converted(error) from (error.orig if isinstance(error, DBAPIError) else None)

    def _converted(self, error: Exception) -> StorageError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = " ".join(without(str(cause), self._secrets).split())[:300]
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in reason), "")
        return StorageError(f"the database {self.shown} cannot be used: {reason}{remedy}")


def _may_pass(error: StorageError) -> bool:
    """Return True if a retry may help: not after a refusal by the server, and not for files."""
    cause = error.__cause__
    if cause is None or type(cause).__module__.partition(".")[0] == "sqlite3":
        return False
    reason = str(cause)
    return any(word in reason for word in _PASSING) or ("FATAL" not in reason and "ERROR" not in reason)


def _engine(url: sa.URL, deadline_secs: float) -> sa.Engine:
    """Create the engine; SQLite locks the file at the beginning, so that writers wait for each other."""
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"timeout": deadline_secs})
        sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    options: dict[str, Any] = {}
    if url.get_driver_name() in ("psycopg", "psycopg2"):
        # libpq requires integers >= 2
        options = {"connect_timeout": max(2, math.ceil(deadline_secs)), "application_name": "torchrelay"}
    return sa.create_engine(url, poolclass=sa.NullPool, connect_args=options)
