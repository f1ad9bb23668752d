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

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Double,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    String,
    Table,
    and_,
    case,
    create_engine,
    event,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from torchrelay.errors import FormatError, StorageError
from torchrelay.metadata.handlers import EPOCH, HandlerEvent
from torchrelay.metadata.sql.handler import masked, secrets_of, without

Row = dict[str, Any]
Rows = dict[str, list[Row]]
MERGES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "relay_jobs": {"name": max, "prefix": max, "generation": max},
    "relay_branches": {"base": max},
    "relay_epochs": {"branch": max, "nodes": max, "saved_at": min},
    "relay_moved": {"bytes": max},
    "relay_durations": {"secs": max},
}
"""Merge rules of the columns that are not part of a key."""


def rows_of(notes: Iterable[HandlerEvent]) -> Rows:
    """Convert events to rows by table, one per key."""
    found: dict[str, dict[tuple[Any, ...], Row]] = {table: {} for table in MERGES}
    for note in notes:
        for table, row in _rows_of(note):
            merges = MERGES[table]
            key = tuple(value for name, value in row.items() if name not in merges)
            known = found[table].setdefault(key, row)
            if known is not row:
                found[table][key] = merged(table, known, row)
    return {table: list(rows.values()) for table, rows in found.items()}


def merged(table: str, one: Row, other: Row) -> Row:
    """Merge two rows with the same key."""
    if table == "relay_jobs" and one["generation"] != other["generation"]:
        return max(one, other, key=lambda row: row["generation"])
    result = dict(one)
    for name, choose in MERGES[table].items():
        known = [row[name] for row in (one, other) if row[name] is not None]
        result[name] = choose(known) if known else None
    return result


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
metadata = MetaData()

SCHEMA = Table("relay_schema", metadata, Column("version", BigInteger, primary_key=True, autoincrement=False))

JOBS = Table(
    "relay_jobs",
    metadata,
    Column("job", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("prefix", String, nullable=False),
    Column("generation", BigInteger, nullable=False),
)

BRANCHES = Table(
    "relay_branches",
    metadata,
    Column("job", String),
    Column("branch", BigInteger, autoincrement=False),
    Column("base", BigInteger),
    PrimaryKeyConstraint("job", "branch"),
)


def _of_an_epoch() -> tuple[Column[str], Column[int], Column[int]]:
    return (
        Column("job", String),
        Column("epoch", BigInteger, autoincrement=False),
        Column("generation", BigInteger, autoincrement=False),
    )


EPOCHS = Table(
    "relay_epochs",
    metadata,
    *_of_an_epoch(),
    Column("branch", BigInteger, nullable=False),
    Column("nodes", BigInteger, nullable=False),
    Column("saved_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("job", "epoch", "generation"),
)

_OF_A_NODE = ("job", "epoch", "generation", "action", "node")

MOVED = Table(
    "relay_moved",
    metadata,
    *_of_an_epoch(),
    Column("action", String),
    Column("node", String),
    Column("bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint(*_OF_A_NODE),
)

DURATIONS = Table(
    "relay_durations",
    metadata,
    *_of_an_epoch(),
    Column("action", String),
    Column("node", String),
    Column("phase", String),
    Column("secs", Double, nullable=False),
    PrimaryKeyConstraint(*_OF_A_NODE, "phase"),
)

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


def has_tables(connection: Connection, where: str) -> bool:
    """Return True if the tables exist; raises FormatError for another version of the schema."""
    if not inspect(connection).has_table(SCHEMA.name):
        return False
    versions = sorted(connection.execute(select(SCHEMA.c.version)).scalars())
    if versions == [VERSION]:
        return True
    found = ", ".join(map(str, versions)) or "none"
    raise FormatError(
        f"the database {where} has tables of schema version {found} in {SCHEMA.name}, but this torchrelay "
        f"writes version {VERSION}: use another database and fill it with torchrelay runs index"
    )


def make_tables(connection: Connection, where: str) -> None:
    """Create missing tables in the open transaction; concurrent calls wait for each other."""
    if has_tables(connection, where):
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if has_tables(connection, where):
            return
    metadata.create_all(connection)
    connection.execute(text(CURRENT_EPOCHS))
    connection.execute(insert(SCHEMA).values(version=VERSION))


def put(connection: Connection, rows: Rows) -> None:
    """Insert rows, or merge them with existing ones.

    Rows are sorted, so that concurrent jobs lock them in the same order and do not deadlock.
    """
    for name, content in rows.items():
        if content:
            table = metadata.tables[name]
            keys = [column.name for column in table.primary_key]
            in_order = sorted(content, key=lambda row: [row[key] for key in keys])
            connection.execute(_statement(connection.dialect.name, table), in_order)


def _statement(dialect: str, table: Table) -> Any:
    insert: Any = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    new = insert.excluded
    changes = {}
    for name, choose in MERGES[table.name].items():
        old = table.c[name]
        wins = new[name] < old if choose is min else new[name] > old
        if table.name == "relay_jobs":  # all follow the newer generation
            generation = table.c.generation
            wins = or_(new.generation > generation, and_(new.generation == generation, wins))
        else:
            wins = or_(old.is_(None), wins)
        changes[name] = case((wins, new[name]), else_=old)
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
    """Stores and reads events.

    `deadline_secs` limits a connect, a wait for a lock and a statement, as far as the driver supports it.
    """

    def __init__(self, url: URL, deadline_secs: float) -> None:
        self.shown = masked(url)
        self.deadline_secs = deadline_secs
        self._secrets = secrets_of(url)
        self._engine = _engine(url, deadline_secs)

    def store(self, notes: Iterable[HandlerEvent]) -> None:
        """Store events in one transaction, creating missing tables.

        Raises StorageError, and FormatError for tables of another version.
        """
        with self._transaction() as connection:
            make_tables(connection, self.shown)
            put(connection, rows_of(notes))

    def known(self, uuid: str) -> set[tuple[int, int, str]]:
        """Return the keys of the stored events of a job; see `HandlerEvent.key`."""
        epochs, moved = EPOCHS.c, MOVED.c
        saved = select(epochs.generation, epochs.epoch).where(epochs.job == uuid)
        told = select(moved.generation, moved.epoch, moved.action).where(moved.job == uuid).distinct()
        found = {(generation, epoch, EPOCH) for generation, epoch in self._read(saved)}
        return found | {(generation, epoch, action) for generation, epoch, action in self._read(told)}

    def newest_epoch(self, *, uuid: str | None, prefix: str) -> int | None:
        """Return the newest current epoch of a job, or of the last job seen at a prefix."""
        if uuid is None:
            jobs, epochs = JOBS.c, EPOCHS.c
            seen = func.max(epochs.saved_at).desc()
            of_prefix = select(jobs.job).join(EPOCHS, epochs.job == jobs.job)
            of_prefix = of_prefix.where(jobs.prefix == prefix).group_by(jobs.job).order_by(seen)
            found = self._read(of_prefix.limit(1))
            if not found:
                return None
            uuid = found[0][0]
        current = text("SELECT MAX(epoch) FROM relay_current_epochs WHERE job = :job").bindparams(job=uuid)
        rows = self._read(current)
        return None if not rows or rows[0][0] is None else int(rows[0][0])

    def _read(self, query: Select[Any] | Any) -> list[tuple[Any, ...]]:
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
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection, connection.begin():
                if connection.dialect.name == "postgresql":
                    limit = max(1, int(1000 * self.deadline_secs))
                    connection.execute(text(f"SET LOCAL statement_timeout = {limit}"))
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


def _engine(url: URL, deadline_secs: float) -> Engine:
    """Create the engine; SQLite locks the file at the beginning, so that writers wait for each other."""
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": deadline_secs})
        event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    options: dict[str, Any] = {}
    if url.get_driver_name() in ("psycopg", "psycopg2"):
        # libpq requires integers >= 2
        options = {"connect_timeout": max(2, math.ceil(deadline_secs)), "application_name": "torchrelay"}
    return create_engine(url, poolclass=NullPool, connect_args=options)
