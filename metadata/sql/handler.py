"""The metadata handler that tells a database: SQLite in a file, or a PostgreSQL server."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.errors import DamagedError, NotAllowedNowError, RelayError, StorageError, UsageError
from torchrelay.metadata.file_handler import FILE_NAME
from torchrelay.metadata.files import read_json
from torchrelay.metadata.handler import Holder
from torchrelay.metadata.notes import EPOCH, Note, notes_of_file, report_notes
from torchrelay.metadata.sql.bounded_call import BoundedCalls
from torchrelay.metadata.sql.database_url import masked, parse_url
from torchrelay.metadata.sql.pending import Pending
from torchrelay.metadata.stats import NodeStats

if TYPE_CHECKING:
    from torchrelay.metadata.sql.database import Database

DEADLINE_SECS = 5.0
_SHARE_OF_RETRIES = 0.7
"""Of the deadline: so that the reason of the last try is there in time."""
_IMPATIENT_SECS = 0.5
_MOST_READ_AGAIN = 10_000
"""Notes of a run directory that a start compares with the database; `torchrelay index` compares all."""


class SqlHandler:
    """Keeps an index of runs in a database, one row per job, epoch, generation, node and phase.

    `url` is `sqlite:///runs.db` or `postgresql://user@host/database`; its password is never shown. Nothing is
    connected before the first `write` or `report`. A database that fails only warns: what it missed is told
    at the next success, or by `torchrelay index`. `deadline_secs` is how long a call waits for it at most,
    and half a second while it is known to be away.

    With `decides=True` a start resumes where the database says: at the user's epoch, else at the newest that
    it knows and no rewind abandoned. Then `last_epoch` raises StorageError, which ends the start, where the
    database cannot be asked.

    Raises UsageError for a URL of another kind, and where SQLAlchemy or the driver is not installed.
    """

    def __init__(self, url: str, *, decides: bool = False, deadline_secs: float = DEADLINE_SECS) -> None:
        self.decides = bool(decides)
        self.deadline_secs = _check_deadline(deadline_secs)
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
        note = Note(self._holder, self._prefix, EPOCH, epoch, time.time(), self._nodes)
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
        if epoch is None and (told := self._run_tells_of(uuid)) is not None:
            raise UsageError(
                f"the database {database.shown} decides where {self._prefix} resumes and knows no epoch of "
                f"it, while the run tells of epoch {told}: fill it with torchrelay index, or leave "
                "decides=True out"
            )
        return epoch

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

    def _run_tells_of(self, uuid: str | None) -> int | None:
        notes = [] if uuid is None else notes_of_file(self._notes_file(), Holder(uuid, "", 0), self._prefix)
        return max((note.epoch for note in notes if note.kind == EPOCH), default=None)

    # The database

    def _notes_file(self) -> Path:
        """What the default handler noted, where the checkpoints lie in a run directory."""
        return Path(self._prefix).parent / FILE_NAME

    def _database(self) -> Database:
        if self._opened is None:
            from torchrelay.metadata.sql.database import Database

            self._opened = Database(self._url, self.deadline_secs)
        return self._opened

    def _tell(self, notes: Sequence[Note], *, always: bool) -> None:
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
            "so does torchrelay index"
        )

    def _store(self, retry_secs: float) -> None:
        database, notes, holder, prefix = self._database(), self._pending.all(), self._holder, self._prefix
        compare = None if holder is None or "://" in prefix else (holder, self._pending.given_up)
        database.patiently(lambda: database.store(notes), retry_secs)
        self._pending.stored(notes)
        self._answers = True
        if compare is not None and compare != self._compared:
            self._catch_up(database, compare[0], prefix)
            self._compared = compare

    def _catch_up(self, database: Database, holder: Holder, prefix: str) -> None:
        """Store what the run directory tells and the database lacks: an earlier process could not."""
        noted = notes_of_file(Path(prefix).parent / FILE_NAME, holder, prefix, _MOST_READ_AGAIN)
        if noted:
            known = database.known(holder.uuid)
            if missing := [note for note in noted if note.key not in known]:
                database.store(missing)


def _check_deadline(secs: float) -> float:
    if type(secs) in (int, float) and math.isfinite(secs) and 0 < secs <= 600:
        return float(secs)
    raise UsageError(f"deadline_secs is {secs!r:.80}; it is a number of seconds above 0, at most 600")
