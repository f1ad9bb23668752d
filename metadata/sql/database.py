"""One database: every call is a connection and a transaction of its own, so that none can be stale.

What a driver raises becomes a StorageError with the URL, without its password, and the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, create_engine, event, func, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from torchrelay.errors import StorageError
from torchrelay.metadata.handlers import EPOCH, Note
from torchrelay.metadata.sql import tables
from torchrelay.metadata.sql.tables import has_tables, make_tables, put, rows_of
from torchrelay.metadata.sql.url import masked, secrets_of, without

Result = TypeVar("Result")
_FIRST_PAUSE_SECS = 0.05
_LONGEST_PAUSE_SECS = 0.5
_PASSING = ("database system is", "terminating connection", "too many", "remaining connection slots")
_REMEDIES = {
    "not a database": "; move the file away and fill a new one with torchrelay index",
    "malformed": "; move the file away and fill a new one with torchrelay index",
    "unable to open": "; its folder must be there, and file and folder writable",
    "readonly": "; file and folder must be writable",
}


class Database:
    """Stores notes and answers what is stored.

    `deadline_secs` bounds a connect, a wait for a lock, a statement, as far as the driver keeps to it.
    """

    def __init__(self, url: URL, deadline_secs: float) -> None:
        self.shown = masked(url)
        self.deadline_secs = deadline_secs
        self._secrets = secrets_of(url)
        self._engine = _engine(url, deadline_secs)

    def store(self, notes: Iterable[Note]) -> None:
        """Put notes into the tables, all or none; missing tables are made.

        Raises StorageError, and FormatError for tables of another version.
        """
        with self._transaction() as connection:
            make_tables(connection, self.shown)
            put(connection, rows_of(notes))

    def known(self, uuid: str) -> set[tuple[int, int, str]]:
        """The keys of the notes of a job that are there; see `Note.key`."""
        epochs, moved = tables.EPOCHS.c, tables.MOVED.c
        saved = select(epochs.generation, epochs.epoch).where(epochs.job == uuid)
        told = select(moved.generation, moved.epoch, moved.action).where(moved.job == uuid).distinct()
        found = {(generation, epoch, EPOCH) for generation, epoch in self._read(saved)}
        return found | {(generation, epoch, action) for generation, epoch, action in self._read(told)}

    def newest_epoch(self, *, uuid: str | None, prefix: str) -> int | None:
        """The newest epoch that no rewind has abandoned, of a job, or of the last one seen at a prefix."""
        if uuid is None:
            jobs, epochs = tables.JOBS.c, tables.EPOCHS.c
            seen = func.max(epochs.saved_at).desc()
            of_prefix = select(jobs.job).join(tables.EPOCHS, epochs.job == jobs.job)
            of_prefix = of_prefix.where(jobs.prefix == prefix).group_by(jobs.job).order_by(seen)
            found = self._read(of_prefix.limit(1))
            if not found:
                return None
            uuid = found[0][0]
        current = text("SELECT MAX(epoch) FROM relay_current_epochs WHERE job = :job").bindparams(job=uuid)
        rows = self._read(current)
        return None if not rows or rows[0][0] is None else int(rows[0][0])

    def _read(self, query: Select[Any] | Any) -> list[tuple[Any, ...]]:
        """The rows of a query; none where the tables were never made."""
        with self._transaction() as connection:
            if not has_tables(connection, self.shown):
                return []
            return [tuple(row) for row in connection.execute(query)]

    def patiently(self, call: Callable[[], Result], patience_secs: float) -> Result:
        """Call until it works, for so many seconds where waiting may help: a server is started again."""
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
            raise self._told(error) from (error.orig if isinstance(error, DBAPIError) else None)

    def _told(self, error: Exception) -> StorageError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = " ".join(without(str(cause), self._secrets).split())[:300]
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in reason), "")
        return StorageError(f"the database {self.shown} cannot be used: {reason}{remedy}")


def _may_pass(error: StorageError) -> bool:
    """Whether waiting may help: not where a server has answered no, and not for files."""
    cause = error.__cause__
    if cause is None or type(cause).__module__.partition(".")[0] == "sqlite3":
        return False
    reason = str(cause)
    return any(word in reason for word in _PASSING) or ("FATAL" not in reason and "ERROR" not in reason)


def _engine(url: URL, deadline_secs: float) -> Engine:
    """SQLite locks the file when a transaction begins: two writers wait for each other, none gives up."""
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": deadline_secs})
        event.listen(engine, "connect", _let_us_begin)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    options: dict[str, Any] = {}
    if url.get_driver_name() in ("psycopg", "psycopg2"):
        # libpq takes whole seconds from 2 on
        options = {"connect_timeout": max(2, math.ceil(deadline_secs)), "application_name": "torchrelay"}
    return create_engine(url, poolclass=NullPool, connect_args=options)


def _let_us_begin(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
