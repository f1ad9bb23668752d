"""Append to the log, as the run that holds its lease, or as a guest.

A guest's record keeps the generation of the writer before it, and that writer applies its change. Every
append is durable when it returns. After a FencedError a job must stop: another job has the directory, and
nothing was written since.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from threading import Lock

from torchrelay.checkpoint.format.names import check_mark_name
from torchrelay.checkpoint.format.position import (
    CommittedPosition,
    Key,
    Position,
    Retirement,
    State,
    TagOrPin,
)
from torchrelay.checkpoint.log import state as changes
from torchrelay.checkpoint.log.chain import (
    HINT,
    OvertakenError,
    RecordDraft,
    Tail,
    advance,
    append,
    read_tail,
    thin,
)
from torchrelay.checkpoint.log.lease import (
    PATIENCE_SECS,
    PERIOD_SECS,
    Beat,
    WriterIdentity,
    describe,
    move,
    take_over,
)
from torchrelay.checkpoint.log.record import (
    LOG,
    begin_job,
    check_job,
    entry_json,
    key_json,
    position_json,
    read_job,
    retirement_json,
    slot_path,
)
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, FencedError, NotAllowedNowError, StorageError, UnknownEpochError
from torchrelay.records import Json

_ATTEMPTS = 8


def tag_draft(name: str, target: Key | None) -> RecordDraft:
    """Give an epoch a name, or move the name to it; None deletes the name. UsageError for a bad name."""
    return _mark_draft("tag", "tag", name, target)


def pin_draft(name: str, target: Key) -> RecordDraft:
    """Keep an epoch for the reason `name`, one at a time. UsageError for a bad name."""
    return _mark_draft("pin", "pin", name, target)


def unpin_draft(name: str) -> RecordDraft:
    """Remove the pin `name`."""
    return _mark_draft("unpin", "pin", name, None)


def append_as_guest(storage: Storage, draft: RecordDraft, job_name: str | None = None) -> LogView:
    """Append a mark to another writer's log; returns the log after it.

    Raises UnknownEpochError for an epoch that is not live, or a directory without a job.
    """
    job = read_job(storage)
    if job is None:
        raise UnknownEpochError(f"{storage.url} holds no job: check the path")
    for _ in range(_ATTEMPTS):
        tail = read_tail(storage, job)
        if job_name is not None:
            check_job(storage, tail.job, job_name)
        if tail.view.slot < 0:
            raise UnknownEpochError(f"{storage.url} holds no epoch yet")
        if tail.stepped_back:
            raise DamagedError(f"{tail.view.notices[0]}; start the job, then try again")
        storage.sync_dir(LOG)
        try:
            return append(storage, tail, draft)[0].view
        except OvertakenError:
            continue
    raise StorageError(f"{storage.url}/{LOG} changes faster than it can be read: try again later")


def _mark_draft(kind: str, mark: str, name: str, target: Key | None) -> RecordDraft:
    if target is not None:
        check_mark_name(name)

    def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
        place = None if target is None else key_json(target)
        if target is None:
            after = changes.unmarked(state, mark, name)
        else:
            after = changes.marked(state, TagOrPin(mark, name, target))
        return None if after == state else (after, {"name": name, "target": place})

    return RecordDraft(kind, change)


Choose = Callable[[LogView], Iterable[Retirement]]
WhenFenced = Callable[[FencedError], None]


def ignore_fencing(error: FencedError) -> None:
    """Do nothing when fenced: the next append raises the error."""


_LIVE: weakref.WeakValueDictionary[str, LogWriter] = weakref.WeakValueDictionary()
"""Open writers of this process, by nonce: it never takes over from itself."""


class LogWriter:
    """The one writer of a log, from `take` until `close` or until it is fenced.

    One append at a time, from any thread. A writer that is garbage-collected without `close` stops moving its
    counter, so the next one of this process may take over at once.
    """

    def __init__(self, storage: Storage, identity: WriterIdentity) -> None:
        self.storage = storage
        self.identity = identity
        self.nonce = secrets.token_hex(8)
        self.older_attempts: frozenset[str] = frozenset()
        """Attempts that existed before the takeover (see `take_over`)."""
        self.generation = -1
        """The slot of the takeover."""
        self._tail: Tail  # from the takeover on
        self._notices: list[str] = []
        self._deleted: set[Retirement] = set()
        self._process = os.getpid()
        self._lock = Lock()
        self._fenced: FencedError | None = None
        self._closed = False
        self._beat: Beat | None = None
        self._when_fenced: WhenFenced = ignore_fencing

    @classmethod
    def take(
        cls,
        storage: Storage,
        job_name: str | None = None,
        identity: WriterIdentity | None = None,
        *,
        launch: str = "",
        patience_secs: float = PATIENCE_SECS,
        period_secs: float = PERIOD_SECS,
        when_fenced: WhenFenced | None = None,
        follows: bool = False,
    ) -> LogWriter:
        """Become the writer of the job's directory, which is created if necessary.

        `when_fenced` is called once, from the counter's thread, at most a period after a takeover by another
        job: a writer without anything to append must end too. `launch` is that of the processes (see
        `Peers`), for a default `identity`.

        Raises UsageError for a directory of another job; DirectoryInUseError if its writer is alive (its
        counter moved within `patience_secs`) or is another one of this process; DamagedError or FormatError
        for a log that cannot be trusted or read; StorageError if it cannot be written; NoProvableEpochError
        for epochs without a log, unless this one `follows` another log, which may list them.
        """
        job = begin_job(storage, job_name)
        writer = cls(storage, identity or WriterIdentity.here(job.name, launch=launch))
        writer._when_fenced = when_fenced or ignore_fencing
        # Registered before its record exists, so that no other thread takes it for an abandoned one.
        _LIVE[writer.nonce] = writer
        try:
            writer._tail, writer.older_attempts = take_over(
                storage,
                job,
                job_name,
                writer.identity,
                writer.nonce,
                live_here=_LIVE,
                patience_secs=patience_secs,
                follows=follows,
            )
            writer._begin(period_secs)
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def view(self) -> LogView:
        """The log after our last append."""
        return self._tail.view

    @property
    def notices(self) -> tuple[str, ...]:
        """For display: damage found, a failed hint or thinning."""
        return (*self._tail.view.notices, *self._notices)

    @property
    def undeleted(self) -> tuple[Retirement, ...]:
        """Retirements in the log that `forget` has not removed yet."""
        return tuple(one for one in self.view.state.retiring if one not in self._deleted)

    @property
    def has_leftovers(self) -> bool:
        """Whether there may be anything to delete. Sends no request."""
        return bool(self.undeleted or (self.view.certain and self.older_attempts - self.view.state.tries))

    def commit(self, entry: CommittedPosition) -> LogView:
        """Commit a position, durably; its attempt must be complete and durable.

        Mid-epoch positions that it completes are retired. Repeating a commit only ensures that it is in the
        log. Raises as `state.committed` does, and FencedError.
        """

        def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
            if entry in state.entries:
                return None
            return changes.committed(state, entry), {"entry": entry_json(entry)}

        return self.change("commit", change)

    def rewind(self, base: Position | None, request: Mapping[str, Json], *, branch: int | None = None) -> int:
        """Begin a new branch at `base` as seen from `branch`; returns its id.

        None is a fresh start: the new branch sees no older epoch. `request` is the user's request, stored in
        `view.begun_by`.
        """

        def change(state: State) -> tuple[State, Mapping[str, Json]]:
            after = changes.rewound(state, base, request, branch)
            payload = {"base": position_json(base), "branch": after.current, "request": dict(request)}
            return after, payload

        return self.change("rewind", change).current.id

    def retire(
        self, retirements: Iterable[Retirement] | Choose, rule: str | None = None
    ) -> tuple[Retirement, ...]:
        """Retire attempts, or groups of their files; returns those that were retired.

        A function chooses from the log in the slot of the record, so that an earlier pin is respected.
        Protected entries are skipped silently. Deletes no file. `rule` is the reason, for display.
        """
        allowed: tuple[Retirement, ...] = ()
        fixed = () if callable(retirements) else tuple(retirements)

        def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
            nonlocal allowed
            view = replace(self._tail.view, state=state)
            chosen = tuple(retirements(view)) if callable(retirements) else fixed
            after, allowed = changes.retired(state, chosen)
            if not allowed:
                return None
            said = {} if rule is None else {"rule": rule}
            return after, {"retired": [retirement_json(one) for one in allowed], **said}

        self.change("retire", change)
        return allowed

    def quarantine(self, key: Key, reason: str) -> LogView:
        """Mark an entry as damaged: it is not chosen any more, its files stay."""

        def change(state: State) -> tuple[State, Mapping[str, Json]]:
            return changes.quarantined(state, key), {**key_json(key), "reason": reason}

        return self.change("quarantine", change)

    def change(
        self, kind: str, change: Callable[[State], tuple[State, Mapping[str, Json]] | None]
    ) -> LogView:
        """Append a record that follows another log of this job; None of `change` appends nothing."""
        return self.append_draft(RecordDraft(kind, change))

    def forget(self, deleted: Iterable[Retirement]) -> None:
        """Remove retirements that are deleted completely from the next record."""
        with self._lock:  # an append by another thread may be iterating over them
            self._deleted.update(deleted)

    def check(self) -> None:
        """Raise FencedError if a takeover by another writer is known. Sends no request."""
        if self._fenced is not None:
            raise self._fenced

    def ask(self) -> None:
        """As `check`, after one request to the storage whether the log continued without us."""
        with self._lock:
            self._look_ahead()
        self.check()

    def release(self) -> None:
        """Release the log for the next writer, and close; nothing in a fork, whose parent holds it."""
        if self._is_forked:
            return
        try:
            self.change("released", lambda state: (replace(state, released=True), {}))
        finally:
            self.close()

    @property
    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def close(self) -> None:
        """Stop the counter; the log is unchanged. A second call does nothing."""
        self._closed = True
        _LIVE.pop(self.nonce, None)
        if self._beat is not None:
            self._beat.stop()

    def _begin(self, period_secs: float) -> None:
        """Keep the takeover, tidy the log, and start the counter."""
        self.generation = self._tail.view.generation
        move(self.storage, self.generation, self.nonce, 1)
        self._tidy()
        mine = weakref.ref(self)

        def beat(count: int) -> bool:
            writer = mine()
            return writer is not None and writer._beat_now(count)

        self._beat = Beat(beat, period_secs)

    def append_draft(self, draft: RecordDraft) -> LogView:
        """Append a record of this writer, durably; returns the log after it."""
        if self._is_forked:
            raise NotAllowedNowError(
                f"{self.storage.url} is held by process {self._process}, from which this one was forked: "
                "save only there"
            )
        with self._lock:
            self.check()
            if self._closed:
                raise NotAllowedNowError(f"the log of {self.storage.url} was closed: take it again")
            try:
                change = draft.change
                deleted = frozenset(self._deleted)
                draft = RecordDraft(
                    draft.kind, lambda state: change(changes.forgotten(state, deleted)), self.generation
                )
                self._tail, record = append(self.storage, self._tail, draft)
            except OvertakenError:
                raise self._fence() from None
            self._deleted.intersection_update(self._tail.view.state.retiring)
            if record is not None:
                self._tidy()
            return self._tail.view

    def _fence(self) -> FencedError:
        try:
            holder = read_tail(self.storage, self._tail.job).view.state.holder
        except StorageError:  # any other writer: this one has lost the log
            holder = {}
        taken_by = describe(holder, "this job has stopped writing; nothing of it was acknowledged since")
        self._fenced = FencedError(f"{self.storage.url} was taken over by {taken_by}")
        _LIVE.pop(self.nonce, None)
        return self._fenced

    def _tidy(self) -> None:
        """Write the hint and thin the log; a failure is only a notice."""
        slot = self._tail.view.slot
        try:
            self.storage.replace(HINT, b"%d\n" % slot)
            thin(self.storage, self._tail.job, slot)
        except StorageError as error:
            self._notices[:] = [f"the log could not be tidied: {error}"]

    def _beat_now(self, count: int) -> bool:
        """Move the counter, unless the slot after ours shows that we are fenced; False ends the thread."""
        # A long append holds the lock; the counter must move anyway, or this writer would seem dead.
        if self._lock.acquire(blocking=False):
            try:
                self._look_ahead()
            finally:
                self._lock.release()
        if self._closed:
            return False
        if self._fenced is not None:
            self._when_fenced(self._fenced)
            return False
        move(self.storage, self.generation, self.nonce, count)
        return True

    def _look_ahead(self) -> None:
        """Apply appends of guests, up to a takeover, which fences us."""
        moved = False
        while self._fenced is None and self.storage.stat(slot_path(self._tail.next_slot)) is not None:
            tail, other = advance(self.storage, self._tail)
            if other is not None and other.generation > self.generation:
                self._fence()
                return
            if not moved:
                self.storage.sync_dir(LOG)  # the previous record must survive a power cut
            self._tail, moved = tail, True
