"""Metadata handler for databases, with a queue of pending events and time limits on calls.

Drivers have no reliable time limits for a frozen server, a name that does not resolve, or a lost network
share.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchrelay.errors import (
    DamagedError,
    NotAllowedNowError,
    RelayError,
    StorageError,
    UsageError,
    install_command,
)
from torchrelay.metadata.fs import read_json
from torchrelay.metadata.handlers import (
    EPOCH,
    FILE_NAME,
    HandlerEvent,
    Holder,
    NodeStats,
    notes_of_file,
    report_notes,
)

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from torchrelay.metadata.sql.database import Database


FORMS = "sqlite:///runs.db or postgresql://user@host/database"
HIDDEN = "***"
_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_IN_URL = re.compile(r"(^|(?<=//)).*@", re.DOTALL)
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


def parse_url(text: str) -> URL:
    """Parse the URL of a SQLite file (made absolute) or a PostgreSQL server; raises UsageError."""
    if not isinstance(text, str):
        raise UsageError(f"invalid database {type(text).__name__}: expected a URL, {FORMS}")
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
    except ImportError as error:
        raise UsageError(f"a metadata database needs SQLAlchemy: {install_command('sql')}") from error
    try:
        url = make_url(text)
        url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
        if isinstance(password := url.query.get("password"), tuple):
            raise ValueError("two passwords")
        if password is not None:  # to where it is masked
            url = url.difference_update_query(["password"]).set(password=password)
        backend, is_async = url.get_backend_name(), url.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError, ImportError):
        raise UsageError(f"{hide_password(text)} is not a database URL: expected {FORMS}") from None
    if backend != "sqlite" and any("@" in (part or "") for part in (url.host, url.database)):
        raise UsageError(
            f"{hide_password(text)}: @ / : ? in a user's name or password must be written %40 %2F %3A %3F"
        )
    if backend not in ("sqlite", "postgresql") or is_async:
        raise UsageError(
            f"{masked(url)} is not a supported database: expected {FORMS}, without an asynchronous driver"
        )
    if backend == "sqlite":
        name = url.database
        if url.query:
            wrong = f"options such as {min(url.query)}= are not supported for SQLite"
        elif name and name != ":memory:" and not name.startswith("file:"):
            return url.set(database=str(Path(name).absolute()))
        else:
            wrong = f"{masked(url)} has no file name"
        raise UsageError(f"{wrong}: expected {FORMS}")
    try:
        url.get_dialect().import_dbapi()
    except ImportError as error:
        package = getattr(error, "name", None) or url.get_driver_name()
        raise UsageError(
            f"{masked(url)} needs {package}, which is not installed: {install_command('postgresql')}"
        ) from error
    return url


def masked(url: URL) -> str:
    """Return the URL for display, without passwords, including those in options."""
    for key in _SECRETS:
        if key in url.query:
            url = url.update_query_dict({key: HIDDEN})
    return url.render_as_string(hide_password=True)


def secrets_of(url: URL) -> tuple[str, ...]:
    """Return the secrets in a URL."""
    values = (url.password, *(url.query.get(key) for key in _SECRETS))
    return tuple(value for value in values if isinstance(value, str) and value)


def without(text: str, secrets: tuple[str, ...]) -> str:
    """Mask the secrets in a text, except those of one or two letters, which would garble it."""
    for secret in secrets:
        if len(secret) > 2:
            text = text.replace(secret, HIDDEN)
    return text


def hide_password(text: str) -> str:
    """Mask the password in a text that is not a valid URL."""
    return _IN_URL.sub(f"{HIDDEN}@", text).partition("?")[0][:120]


MOST_ROWS = 100_000
"""Limit of some tens of megabytes; the oldest events are dropped first."""


class Pending:
    """Queue of events, added by one thread and removed by another once they are stored."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.given_up = 0
        """Number of dropped events."""
        self._most = most_rows
        self._rows = 0
        self._notes: deque[HandlerEvent] = deque()
        self._lock = threading.Lock()

    def add(self, notes: Sequence[HandlerEvent]) -> None:
        """Add events; at least the newest one is kept."""
        with self._lock:
            self._notes.extend(notes)
            self._rows += sum(map(rows_in, notes))
            while self._rows > self._most and len(self._notes) > 1:
                self._rows -= rows_in(self._notes.popleft())
                self.given_up += 1

    def all(self) -> tuple[HandlerEvent, ...]:
        """Return all events, oldest first."""
        with self._lock:
            return tuple(self._notes)

    def stored(self, notes: Sequence[HandlerEvent]) -> None:
        """Remove stored events."""
        done = set(map(id, notes))
        with self._lock:
            self._notes = deque(note for note in self._notes if id(note) not in done)
            self._rows = sum(map(rows_in, self._notes))


def rows_in(note: HandlerEvent) -> int:
    """Estimate the rows of an event."""
    return 1 + sum(1 + len(times.secs) for times in note.times)


Result = TypeVar("Result")


class BoundedCalls:
    """Makes calls with a time limit, each in a daemon thread."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, 0.0
        self._running: Future[Any] | None = None

    def make(self, call: Callable[[], Result], wait_secs: float) -> Result:
        """Return the result of a call, or raise its error.

        StorageError if it takes too long, when it keeps running and may succeed, or if an earlier one does.
        """
        if self._running is not None and not self._running.done():
            raise StorageError(f"{self._what} has not answered for {time.monotonic() - self._began:.0f} s")
        running: Future[Result] = Future()

        def run() -> None:
            try:
                running.set_result(call())
            except BaseException as error:
                running.set_exception(error)

        self._began = time.monotonic()
        threading.Thread(target=run, name="metadata database", daemon=True).start()
        self._running = running
        if wait([running], wait_secs).not_done:
            raise StorageError(f"{self._what} did not answer within {wait_secs:g} s")
        return running.result()


DEADLINE_SECS = 5.0
_SHARE_OF_RETRIES = 0.7
"""Fraction of the deadline for the last attempt, so that its error is reported in time."""
_IMPATIENT_SECS = 0.5
_MOST_READ_AGAIN = 10_000
"""Events of a run directory that a launch compares with the database; `runs index` compares all."""


class SqlHandler:
    """Metadata handler that keeps an index of runs in a database.

    Connects at the first `write` or `report`. Failures only cause warnings; missed events are stored at the
    next success, or by `torchrelay runs index`.

    Args:
        url: `sqlite:///runs.db` or `postgresql://user@host/database`; its password is never shown.
        decides: Resume at the user's epoch, else at the newest current epoch in the database; a launch then
            fails with StorageError if the database is unavailable.
        deadline_secs: Longest wait for a call, or 0.5 s while the database is known to be unavailable.

    Raises:
        UsageError: The URL is not supported, or SQLAlchemy or the driver is not installed.

    Example:
        JobRunner(job, "runs/hello", metadata_handler=SqlHandler("sqlite:///runs.db"))
    """

    def __init__(self, url: str, *, decides: bool = False, deadline_secs: float = DEADLINE_SECS) -> None:
        self.decides = bool(decides)
        if not (type(deadline_secs) in (int, float) and 0 < deadline_secs <= 600):
            raise UsageError(
                f"deadline_secs is {deadline_secs!r:.80}; it is a number of seconds above 0, at most 600"
            )
        self.deadline_secs = float(deadline_secs)
        self._url = parse_url(url)
        self._calls = BoundedCalls(f"the database {masked(self._url)}")
        self._opened: Database | None = None
        self._pending = Pending()
        self._holder: Holder | None = None
        self._prefix = ""
        self._nodes = 0
        self._answers = True
        self._compared: tuple[Holder, int] | None = None
        """Launch and number of losses at the last comparison of the run directory with the database."""

    def __repr__(self) -> str:
        return f"SqlHandler({masked(self._url)!r})"

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Set the location of the checkpoints and the nodes.

        Args:
            db_prefix: Directory or URL of the checkpoints.
            db_type: Not used.
            node_names: The nodes whose state is saved.
            path_prefix: Not used.
            path_type: Not used.

        Example:
            handler.set_params("runs/a/checkpoints", "torchrelay", ["trainer_0"])
        """
        self._prefix = db_prefix if "://" in db_prefix else str(Path(db_prefix).absolute())
        self._nodes, self._holder = len(node_names), None

    def opened(self, holder: Holder) -> None:
        """Set the holder of all further rows."""
        self._holder = holder

    def write(self, epoch: int) -> None:
        """Store that an epoch is committed; raises StorageError if that is deferred to a later call."""
        if self._holder is None:
            raise NotAllowedNowError("SqlHandler.write was called outside of a run")
        note = HandlerEvent(self._holder, self._prefix, EPOCH, epoch, time.time(), self._nodes)
        self._send([note], always=True)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Store the seconds of an action; ignored outside of a run.

        Args:
            action: Its name, such as `checkpoint_save`.
            stats: Seconds by logical path; only a `NodeStats` of torchrelay is stored.

        Example:
            handler.report("checkpoint_save", stats)
        """
        if self._holder is not None and isinstance(stats, NodeStats):
            notes = report_notes(self._holder, self._prefix, action, stats.nodes, time.time())
            self._send(notes, always=False)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True: saves do not need the database."""
        return True

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the user's choice, else with `decides` the newest epoch in the database; None: from scratch.

        Raises StorageError if the database is unavailable, and UsageError if it has no epoch but the run
        directory has some, because an empty database must not abandon a run.
        """
        if not self.decides or user_epoch is not None:
            return user_epoch
        uuid = self._uuid_there()
        if uuid is None and "://" not in self._prefix:
            return None
        database = self._database()
        epoch = self._calls.make(
            lambda: database.patiently(
                lambda: database.newest_epoch(uuid=uuid, prefix=self._prefix), self.deadline_secs
            ),
            2 * self.deadline_secs + 1,
        )
        if epoch is not None or uuid is None:
            return epoch
        notes = notes_of_file(Path(self._prefix).parent / FILE_NAME, Holder(uuid, "", 0), self._prefix)
        newest = max((note.epoch for note in notes if note.kind == EPOCH), default=None)
        if newest is not None:
            raise UsageError(
                f"the database {database.shown} decides where {self._prefix} resumes but has no epoch of "
                f"it, while the run has epoch {newest}: fill it with torchrelay runs index"
            )
        return None

    def _uuid_there(self) -> str | None:
        """Return the job id of the log at the prefix; None if there is none, or for a remote store."""
        if "://" in self._prefix:
            return None
        records = sorted(Path(self._prefix).glob("log/[0-9]*.json"), reverse=True)
        for path, said, key in [
            (Path(self._prefix) / "job.json", "job", "uuid"),
            *((path, "record", "job") for path in records),  # each record repeats it
        ]:
            with suppress(DamagedError):
                found = (read_json(path) or {}).get(said)
                if isinstance(found, dict) and isinstance(found.get(key), str):
                    return str(found[key])
        if records:  # starting from scratch would be wrong
            raise DamagedError(
                f"{self._prefix} names no job, nor does any record of its log: restore job.json from a copy"
            )
        return None

    def _database(self) -> Database:
        if self._opened is None:
            from torchrelay.metadata.sql.database import Database

            self._opened = Database(self._url, self.deadline_secs)
        return self._opened

    def _send(self, notes: Sequence[HandlerEvent], *, always: bool) -> None:
        """Store events and all pending ones; while the database is unavailable only if `always`."""
        self._pending.add(notes)
        if not (always or self._answers):
            return
        patience = self.deadline_secs if self._answers else min(_IMPATIENT_SECS, self.deadline_secs)
        retries = _SHARE_OF_RETRIES * self.deadline_secs if self._answers else 0.0
        try:
            self._calls.make(lambda: self._store(retries), patience)
        except RelayError as error:
            self._answers = False
            count, lost = len(self._pending.all()), self._pending.given_up
            waiting = "1 event waits" if count == 1 else f"{count} events wait"
            more = f" ({lost} more were dropped)" if lost else ""
            raise StorageError(
                f"{error}; {waiting} for it{more}. Training continues; the next success, or torchrelay runs "
                "index, stores them"
            ) from error

    def _store(self, retry_secs: float) -> None:
        database, notes, holder, prefix = self._database(), self._pending.all(), self._holder, self._prefix
        compare = None if holder is None or "://" in prefix else (holder, self._pending.given_up)
        database.patiently(lambda: database.store(notes), retry_secs)
        self._pending.stored(notes)
        self._answers = True
        if compare is not None and compare != self._compared:
            # The run directory may have events that an earlier process could not store.
            noted = notes_of_file(Path(prefix).parent / FILE_NAME, compare[0], prefix, _MOST_READ_AGAIN)
            known = database.known(compare[0].uuid) if noted else ()
            if missing := [note for note in noted if note.key not in known]:
                database.store(missing)
            self._compared = compare
