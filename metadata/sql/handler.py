"""The metadata handler that writes to a database: which one, what is pending, and calls that may hang.

A driver that waits for a server that is frozen, a name that nobody resolves, a file on a share that is gone:
none of these has a time limit that always holds.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from torchrelay.errors import (
    DamagedError,
    NotAllowedNowError,
    RelayError,
    StorageError,
    UsageError,
    install_command,
)
from torchrelay.metadata.fs import read_json
from torchrelay.metadata.handlers import EPOCH, FILE_NAME, HandlerEvent, Holder, notes_of_file, report_notes
from torchrelay.metadata.statistics import NodeStats

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from torchrelay.metadata.sql.database import Database


FORMS = "sqlite:///runs.db or postgresql://user@host/database"
HIDDEN = "***"
_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_IN_URL = re.compile(r"(^|(?<=//)).*@", re.DOTALL)
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


def parse_url(text: str) -> URL:
    """The URL of a SQLite file (made absolute) or a PostgreSQL server.

    Raises UsageError for any other, and where SQLAlchemy or the driver is not installed.
    """
    if not isinstance(text, str):
        raise UsageError(f"the database is {type(text).__name__}; give a URL, {FORMS}")
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
    except ImportError as error:
        raise UsageError(f"a metadata database needs SQLAlchemy: {install_command('sql')}") from error
    try:
        url = make_url(text)
        url = _with_password(url.set(drivername=_DRIVERS.get(url.drivername, url.drivername)))
        backend, is_async = url.get_backend_name(), url.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError, ImportError):
        raise UsageError(f"{hide_password(text)} is no URL of a database: give {FORMS}") from None
    if backend != "sqlite" and any("@" in (part or "") for part in (url.host, url.database)):
        raise UsageError(
            f"{hide_password(text)}: @ / : ? in a user's name or password are written %40 %2F %3A %3F, else "
            "nobody can tell where the password ends"
        )
    if backend not in ("sqlite", "postgresql") or is_async:
        raise UsageError(
            f"{masked(url)} is no database that torchrelay writes to: give {FORMS}; drivers that are "
            "asynchronous are not for it"
        )
    return _with_file(url) if backend == "sqlite" else _with_driver(url)


def _with_password(url: URL) -> URL:
    """A password among the options goes to its place, where no text of the URL shows it."""
    password = url.query.get("password")
    if password is None:
        return url
    if not isinstance(password, str):
        raise ValueError("two passwords")
    return url.difference_update_query(["password"]).set(password=password)


def _with_file(url: URL) -> URL:
    if url.query:
        raise UsageError(f"a SQLite database has no options here, such as {min(url.query)}=: give {FORMS}")
    name = url.database
    if not name or name == ":memory:" or name.startswith("file:"):
        raise UsageError(f"{masked(url)} names no file, and nobody could read it later: give {FORMS}")
    return url.set(database=str(Path(name).absolute()))


def _with_driver(url: URL) -> URL:
    try:
        url.get_dialect().import_dbapi()
    except ImportError as error:
        package = getattr(error, "name", None) or url.get_driver_name()
        raise UsageError(
            f"{masked(url)} needs {package}, which is not installed: {install_command('postgresql')}"
        ) from error
    return url


def masked(url: URL) -> str:
    """The URL as it may be shown: without passwords, those among its options included."""
    for key in _SECRETS:
        if key in url.query:
            url = url.update_query_dict({key: HIDDEN})
    return url.render_as_string(hide_password=True)


def secrets_of(url: URL) -> tuple[str, ...]:
    """Words that no message may have."""
    values = [url.password, *(url.query.get(key) for key in _SECRETS)]
    return tuple(value for value in values if isinstance(value, str) and value)


def without(text: str, secrets: tuple[str, ...]) -> str:
    """The text with each secret hidden; one of one or two letters would take the words apart instead."""
    for secret in secrets:
        if len(secret) > 2:
            text = text.replace(secret, HIDDEN)
    return text


def hide_password(text: str) -> str:
    """What may be shown of a text that should have been a URL and cannot be read as one."""
    return _IN_URL.sub(f"{HIDDEN}@", text).partition("?")[0][:120]


MOST_ROWS = 100_000
"""Some tens of megabytes; what is older is given up first."""


class Pending:
    """Notes in their order, added by one thread and taken off by another when they are stored."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.given_up = 0
        """Notes that were too many to be remembered."""
        self._most = most_rows
        self._rows = 0
        self._notes: deque[HandlerEvent] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, notes: Sequence[HandlerEvent]) -> None:
        """Remember notes; at least the newest one stays."""
        with self._lock:
            self._notes.extend(notes)
            self._rows += sum(map(rows_in, notes))
            while self._rows > self._most and len(self._notes) > 1:
                self._rows -= rows_in(self._notes.popleft())
                self.given_up += 1

    def all(self) -> tuple[HandlerEvent, ...]:
        """All that is remembered, the oldest first."""
        with self._lock:
            return tuple(self._notes)

    def stored(self, notes: Sequence[HandlerEvent]) -> None:
        """Forget what was stored."""
        done = set(map(id, notes))
        with self._lock:
            self._notes = deque(note for note in self._notes if id(note) not in done)
            self._rows = sum(map(rows_in, self._notes))


def rows_in(note: HandlerEvent) -> int:
    """About how many rows a note makes."""
    return 1 + sum(1 + len(times.secs) for times in note.times)


Result = TypeVar("Result")


class BoundedCalls:
    """Makes calls, each in a thread of its own that no exit of the process waits for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._running: _DatabaseCall[object] | None = None

    def make(self, call: Callable[[], Result], wait_secs: float) -> Result:
        """The result of a call, or its error.

        Raises StorageError where it is not over in time, or where an earlier one is still going on: then
        nothing is called. A call that was given up goes on, and may succeed.
        """
        running = self._running
        if running is not None and running.thread.is_alive():
            raise StorageError(f"{self._what} has not answered for {time.monotonic() - running.began:.0f} s")
        mine = _DatabaseCall(call)
        self._running = mine  # type: ignore[assignment]
        mine.thread.start()
        mine.thread.join(wait_secs)
        if mine.thread.is_alive():
            raise StorageError(f"{self._what} did not answer within {wait_secs:g} s")
        self._running = None
        return mine.outcome()


class _DatabaseCall(Generic[Result]):
    def __init__(self, call: Callable[[], Result]) -> None:
        self.began = time.monotonic()
        self._call = call
        self._results: list[Result] = []
        self._error: BaseException = StorageError("the call is not over")
        self.thread = threading.Thread(target=self._run, name="metadata database", daemon=True)

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def outcome(self) -> Result:
        if self._results:
            return self._results[0]
        raise self._error


DEADLINE_SECS = 5.0
_SHARE_OF_RETRIES = 0.7
"""Of the deadline: so that the reason of the last try is there in time."""
_IMPATIENT_SECS = 0.5
_MOST_READ_AGAIN = 10_000
"""Notes of a run directory that a start compares with the database; `torchrelay runs index` compares all."""


class SqlHandler:
    """Keeps an index of runs in a database, one row per job, epoch, generation, node and phase.

    `url` is `sqlite:///runs.db` or `postgresql://user@host/database`; its password is never shown. Nothing is
    connected before the first `write` or `report`. A database that fails only warns: what it missed is told
    at the next success, or by `torchrelay runs index`. `deadline_secs` is how long a call waits for it at
    most, and half a second while it is known to be away.

    With `decides=True` a start resumes where the database says: at the user's epoch, else at the newest that
    it knows and no rewind abandoned. Then `last_epoch` raises StorageError, which ends the start, where the
    database cannot be asked.

    Raises UsageError for a URL of another kind, and where SQLAlchemy or the driver is not installed.
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
        """For which start, and after how many losses, the run directory was compared with the database."""

    def __repr__(self) -> str:
        return f"SqlHandler({masked(self._url)!r})"

    # What a job tells

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Remember where the job keeps its checkpoints, and its nodes."""
        self._prefix = db_prefix if "://" in db_prefix else str(Path(db_prefix).absolute())
        self._nodes, self._holder = len(node_names), None

    def opened(self, holder: Holder) -> None:
        """Remember whose rows are written from now on."""
        self._holder = holder

    def write(self, epoch: int) -> None:
        """Store that an epoch is saved; StorageError where that must wait for a later call."""
        if self._holder is None:
            raise NotAllowedNowError(
                "SqlHandler.write was called outside of a run: nothing says which job and start it is of"
            )
        note = HandlerEvent(self._holder, self._prefix, EPOCH, epoch, time.time(), self._nodes)
        self._tell([note], always=True)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Store the seconds of an action; what no run has reported is left out."""
        if self._holder is not None and isinstance(stats, NodeStats):
            notes = report_notes(self._holder, self._prefix, action, stats.nodes, time.time())
            self._tell(notes, always=False)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Saves do not need the database."""
        return True

    # What a start asks

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The user's wish; without one, and with `decides`, the newest epoch that the database knows.

        None is from scratch. Raises StorageError where it cannot be asked, and UsageError where it knows none
        although the run directory tells of some: an empty database must not abandon a run.
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
        notes = notes_of_file(self._notes_file, Holder(uuid, "", 0), self._prefix)
        told = max((note.epoch for note in notes if note.kind == EPOCH), default=None)
        if told is not None:
            raise UsageError(
                f"the database {database.shown} decides where {self._prefix} resumes and knows no epoch of "
                f"it, while the run tells of epoch {told}: fill it with torchrelay runs index, or leave "
                "decides=True out"
            )
        return None

    def _uuid_there(self) -> str | None:
        """The job whose log lies at the prefix; None where none was begun, or on a store."""
        if "://" in self._prefix:
            return None
        records = sorted(Path(self._prefix).glob("log/[0-9]*.json"), reverse=True)
        for path, said, key in [
            (Path(self._prefix) / "job.json", "job", "uuid"),
            *((path, "record", "job") for path in records),  # each repeats it
        ]:
            with suppress(DamagedError):
                found = (read_json(path) or {}).get(said)
                if isinstance(found, dict) and isinstance(found.get(key), str):
                    return str(found[key])
        if records:  # from scratch would be a wrong conclusion
            raise DamagedError(
                f"{self._prefix} names no job, nor does any record of its log: restore job.json from a "
                "copy, or choose another directory"
            )
        return None

    # The database

    @property
    def _notes_file(self) -> Path:
        """What the default handler noted, where the checkpoints lie in a run directory."""
        return Path(self._prefix).parent / FILE_NAME

    def _database(self) -> Database:
        if self._opened is None:
            from torchrelay.metadata.sql.database import Database

            self._opened = Database(self._url, self.deadline_secs)
        return self._opened

    def _tell(self, notes: Sequence[HandlerEvent], *, always: bool) -> None:
        """Store notes and all that is pending; while the database is away only if `always`."""
        self._pending.add(notes)
        if not (always or self._answers):
            return
        patience = self.deadline_secs if self._answers else min(_IMPATIENT_SECS, self.deadline_secs)
        retries = _SHARE_OF_RETRIES * self.deadline_secs if self._answers else 0.0
        try:
            self._calls.make(lambda: self._store(retries), patience)
        except RelayError as error:
            self._answers = False
            raise StorageError(f"{error}; {self._waiting()}") from error

    def _waiting(self) -> str:
        count, lost = len(self._pending), self._pending.given_up
        waiting = "1 note waits" if count == 1 else f"{count} notes wait"
        more = f" ({lost} more are forgotten)" if lost else ""
        return (
            f"{waiting} for it{more}. Training goes on, the next success brings the database up to date, and "
            "so does torchrelay runs index"
        )

    def _store(self, retry_secs: float) -> None:
        database, notes, holder, prefix = self._database(), self._pending.all(), self._holder, self._prefix
        compare = None if holder is None or "://" in prefix else (holder, self._pending.given_up)
        database.patiently(lambda: database.store(notes), retry_secs)
        self._pending.stored(notes)
        self._answers = True
        if compare is not None and compare != self._compared:
            # The run directory may tell what an earlier process could not store.
            noted = notes_of_file(Path(prefix).parent / FILE_NAME, compare[0], prefix, _MOST_READ_AGAIN)
            known = database.known(compare[0].uuid) if noted else ()
            if missing := [note for note in noted if note.key not in known]:
                database.store(missing)
            self._compared = compare
