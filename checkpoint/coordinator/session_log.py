"""Share the log between the processes of a session, and delete files in the background.

Rank 0 reads and writes. Its results are sent to all, and its errors raise on all. Reading needs no write
access. All methods are called by all processes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.format import position
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.load.verify import JointResult, Target, VerificationStatus, verify_together
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import entry_json, entry_of
from torchrelay.checkpoint.log.view import LeaseInfo, LogView, Look
from torchrelay.checkpoint.log.writer import LogWriter, WhenFenced, ignore_fencing
from torchrelay.checkpoint.save.commit import Apart
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.checkpoint.storage.open import NOTES
from torchrelay.errors import (
    DamagedError,
    FencedError,
    NoProvableEpochError,
    NotAllowedNowError,
    RelayError,
    StorageError,
    UnknownEpochError,
    UsageError,
)
from torchrelay.jobs import runtime
from torchrelay.jobs.runtime import Worker, WorkItem
from torchrelay.jobs.session import Peers, decide, warn

PATIENCE_SECS = 300.0
"""Maximum seconds to wait for deletions: less than the other processes wait for this one."""


class Deletions:
    """Runs queued deletions one after the other; keeps failures until they are taken."""

    def __init__(self) -> None:
        self._worker = Worker("torchrelay deletions")
        self._last: WorkItem[None] | None = None
        self._failed: list[str] = []

    def ask(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` in the thread; if it raises, `what` and the reason are kept as a failure."""

        def run() -> None:
            runtime.wait_for_turn()
            try:
                work()
            except Exception as error:
                self._failed.append(f"{what}: {error}")

        self._last = self._worker.submit(run)
        if self._last is None:
            run()

    def wait(self, patience_secs: float = PATIENCE_SECS) -> bool:
        """Return when all queued work is done; False if that takes longer."""
        with runtime.waiting():
            return self._last is None or self._last.over.wait(patience_secs)

    def take_failures(self) -> list[str]:
        """Failures since the last call, for display."""
        return [self._failed.pop(0) for _ in range(len(self._failed))]


TAKEOVER_MARGIN_SECS = 60.0
"""Extra seconds, beyond the takeover, that other ranks wait for rank 0."""


class Ledger:
    """One directory's log: read, taken over, appended to and released."""

    tolerates = True
    """Whether a directory that cannot be used may count as empty."""

    def __init__(self, storage: Storage, takeover_secs: float) -> None:
        self.storage = storage
        self.takeover_secs = self.takes_secs = takeover_secs
        """Seconds of patience with one writer, and maximum seconds of a takeover."""
        self.job_name: str | None = None
        self.launch = ""
        self.hurried: Callable[[], bool] = lambda: False
        """Whether the run is about to exit: then it does not wait for uploads."""
        self.secs_left: Callable[[], float | None] = lambda: None
        """Seconds until this process must exit; None without a deadline."""
        self.in_run = False
        """A run keeps the log until it ends; a save by hand holds it only for the save."""
        self.when_fenced: WhenFenced = ignore_fencing
        """Called on rank 0, from a thread, when another job has taken the log that a run holds."""
        self.holding: LeaseInfo | None = None
        self.writer: LogWriter | None = None
        """On rank 0, while the log is held."""
        self.deletions = Deletions()
        """Background deletions, on rank 0."""
        self._pending_rewind: tuple[Position | None, dict[str, Any]] | None = None
        self._verified: Target | None = None
        self._exclusive = False

    # Reading

    def look(self, peers: Peers, *, tolerant: bool = False) -> Look:
        """Read the log. `tolerant`: a directory that cannot be read counts as empty, with a notice."""

        def look() -> dict[str, Any]:
            try:
                return self._looked(self.view())
            except StorageError as error:
                if not (tolerant and self.tolerates):
                    raise
                return {**self._looked(LogView()), "notices": [str(error)]}

        found = decide(peers, "read the log", look, by=self.reader_of(peers))
        facts = None if found["facts"] is None else position.facts_of(found["facts"], "the log")
        return Look(**{**found, "facts": facts, "notices": tuple(found["notices"])})

    def _looked(self, view: LogView) -> dict[str, Any]:
        """What all processes receive of a view."""
        newest, whole = view.newest(), view.newest(boundary=True)
        facts = None
        if newest is not None:
            with suppress(OSError):  # the load reports the error
                facts = position.facts_json(codec.read(self.storage, newest).facts)
        return {
            "commits": bool(view.entries),
            "branch": view.current.id,
            "request": dict(view.begun_by) if view.begun_by else None,
            "epoch": newest.position.epoch if newest else None,
            "step": newest.position.step if newest else 0,
            "whole": whole.position.epoch if whole else None,
            "facts": facts,
            "notices": list(view.notices),
        }

    def view(self) -> LogView:
        """The current log: this process's own view while it holds the log. On rank `reader_of` only."""
        return self.writer.view if self.writer is not None else open_log(self.storage, self.job_name)

    def reader_of(self, peers: Peers) -> int:
        """The rank that reads the log. All processes together."""
        return 0

    def may_name(self, entry: CommittedPosition) -> bool:
        """Whether the log on disk has an entry's attempt; True if it cannot be read. Rank 0 only."""
        try:
            return entry.attempt_name in open_log(self.storage, self.job_name).state.tries
        except OSError:
            return True

    def find(self, peers: Peers, epoch: int) -> CommittedPosition:
        """The entry of an epoch as seen from the current branch; UnknownEpochError lists what exists."""
        found = decide(
            peers, "find the epoch", lambda: entry_json(self._known(epoch)), by=self.reader_of(peers)
        )
        return entry_of(found, "the log")

    def find_or_none(self, peers: Peers, epoch: int) -> CommittedPosition | None:
        """The same, None if the epoch is not committed."""

        def find() -> list[Any]:
            return [entry_json(entry) for entry in (self.view().find(epoch),) if entry is not None]

        found = decide(peers, "find the epoch", find, by=self.reader_of(peers))
        return entry_of(found[0], "the log") if found else None

    def _known(self, epoch: int) -> CommittedPosition:
        view = self.view()
        entry = view.find(epoch)
        if entry is None:
            known = ", ".join(map(str, view.epochs())) or "none"
            raise UnknownEpochError(
                f"epoch {epoch} is not committed in {self.storage.url}; there are: {known}"
            )
        return entry

    # Holding

    def open(self, peers: Peers, *, tolerant: bool = False) -> bool:
        """Take the log over; False if a process has to exit before all is done: then nothing may be read.

        Raises DirectoryInUseError for a live holder. `tolerant`: a directory that cannot be used is skipped,
        and every save tries again.
        """
        self.launch = peers.launch

        def take() -> list[Any] | None:
            try:
                return self._take()
            except StorageError:
                if not (tolerant and self.tolerates):
                    raise
                return None

        lease = decide(peers, "take the log over", take, deadline_secs=self.takes_secs + TAKEOVER_MARGIN_SECS)
        self.holding = None if lease is None else LeaseInfo(*lease)
        return True

    def _take(self) -> list[Any]:
        if self.writer is None:
            self._check_exclusion()
            self.writer = self._taken()
        if self._pending_rewind is not None:
            self.writer.rewind(*self._pending_rewind)
            self._pending_rewind = None
        return self._lease()

    def _taken(self) -> LogWriter:
        if self.storage.stat(NOTES) is not None:
            from torchrelay.checkpoint.log.tiered_storage import refuse_local

            refuse_local(self.storage)
        return self._take_log(self.storage)

    def _take_log(self, storage: Storage, *, follows: bool = False) -> LogWriter:
        return LogWriter.take(
            storage,
            self.job_name,
            launch=self.launch,
            patience_secs=self.takeover_secs,
            when_fenced=self.when_fenced,
            follows=follows,
        )

    def _check_exclusion(self) -> None:
        """Check exclusive creation, once per ledger."""
        if not self._exclusive:
            self.storage.mkdir("")
            check_exclusion(self.storage)
            self._exclusive = True

    def _lease(self) -> list[Any]:
        """What all processes receive of a held log."""
        writer = self.required()
        return [writer.view.job_name, writer.view.job_uuid, writer.view.current.id, self.generation]

    @property
    def generation(self) -> int:
        """Number of the launch that holds the log, greater than all earlier ones. Rank 0 only."""
        return self.required().generation

    def rewind(self, peers: Peers, base: Position | None, request: dict[str, Any]) -> None:
        """Begin a branch at `base` (None: before everything), now or when the log is held."""
        if self.holding is None:
            self._pending_rewind = (base, request)
            return

        def append() -> list[Any]:
            self.required().rewind(base, request)
            return self._lease()

        self.holding = LeaseInfo(*decide(peers, "rewind", append))

    def required(self) -> LogWriter:
        """The writer; NotAllowedNowError if the log is not held."""
        if self.writer is None:
            raise NotAllowedNowError("the checkpoint log is not open: save within a train call")
        return self.writer

    def commit(self, entry: CommittedPosition) -> None:
        """Append the commit record of a position. Rank 0 only."""
        self.required().commit(entry)

    def ask(self) -> None:
        """Check the storage: FencedError if another job has taken the log. Rank 0 only."""
        if self.writer is None:
            raise FencedError("the log was released")
        self.writer.ask()

    def last_generation(self) -> int:
        """Generation of the newest writer of any job, from the storage. Rank 0 only."""
        return open_log(self.storage, self.job_name).generation

    def needed(self) -> frozenset[str]:
        """Attempts that retention must not delete under any rule."""
        return frozenset()

    def unseen(self) -> frozenset[str]:
        """Attempts of which rank 0 does not see all files; others do."""
        return frozenset()

    def apart(self) -> Apart | None:
        """Which processes share a directory, with per-host directories."""
        return None

    def wait_for_room(self, peers: Peers) -> None:
        """Called before a save by all processes: returns when it may begin."""

    def drain(self, peers: Peers) -> bool:
        """Called at the end of a run by all processes. Returns whether retention may now delete more."""
        return False

    def take_replicated(self) -> list[Position]:
        """Positions uploaded since the last call; empty without a tier."""
        return []

    def close(self) -> None:
        """Finish deletions and release the log for the next writer; warns if either fails."""
        self.finish_deletions()
        writer, self.writer = self.writer, None
        self.holding, self._pending_rewind, self.in_run = None, None, False
        self.when_fenced, self.hurried, self.secs_left = ignore_fencing, lambda: False, lambda: None
        if writer is not None:
            let_go(writer, "the checkpoint log")

    def finish_deletions(self) -> None:
        """Wait for pending deletions; warns of failures, and of those that take minutes."""
        if not self.deletions.wait():
            warn("files of old epochs are still being deleted: the disk is slow", stacklevel=2)
        self.tell_failed_deletions()

    def tell_failed_deletions(self) -> None:
        """Warn of deletions that failed; the next ones retry them."""
        for failure in self.deletions.take_failures():
            warn(failure, stacklevel=2)

    # Verification

    def verify_epoch(self, peers: Peers, epoch: int, *, whole: bool = True) -> Target:
        """Verify exactly this epoch, or raise DamagedError; `whole`: UsageError without its optimizer."""
        entry = self._asked_for(peers, epoch) if whole else self.find(peers, epoch)
        if self._verified is not None and self._verified.entry == entry:
            return self._verified
        result = self._verify_jointly(peers, entry)
        if result.outcome is VerificationStatus.DAMAGED:
            raise DamagedError(
                f"epoch {epoch} in {self.storage.url} is damaged: {result.reason}; an explicit epoch is "
                "never replaced by another: choose another one"
            )
        return self._target(entry, result)

    def _asked_for(self, peers: Peers, epoch: int) -> CommittedPosition:
        """The entry of an explicit epoch; raises UsageError if it cannot be resumed from."""
        entry = self.find(peers, epoch)
        if not entry.resumable:
            raise UsageError(
                f"epoch {epoch} in {self.storage.url} cannot be resumed from: retention deleted a part "
                f"of it (left: {', '.join(entry.groups)}); choose a newer one. open_checkpoint loads "
                "what is left, and keep_optimizer_last decides how many epochs stay whole"
            )
        return entry

    def check(self, peers: Peers, epoch: int) -> None:
        """Raise the errors of `verify_epoch` that are known before the log is taken."""
        self.verify_epoch(peers, epoch)

    def newest(self, peers: Peers, say: Callable[[str], None]) -> Target:
        """The newest position of the current branch that all processes can verify.

        A damaged one is quarantined, with the reason reported, and the next older one tried; epochs after it
        are saved on a new branch. Raises NoProvableEpochError if none is left, StorageError if one cannot be
        read now.
        """
        return self._newest_after(peers, say, [])

    def instead_of(
        self, peers: Peers, failed: Target, error: RelayError, say: Callable[[str], None]
    ) -> Target:
        """The next older position, if a verified one could not be loaded because its blocks are damaged.

        Every byte of it is read again first: raises `error` if none is damaged.
        """
        result = verify_together(peers, self.storage, failed.entry, level="full")
        if result.outcome is not VerificationStatus.DAMAGED:
            raise error
        return self._newest_after(peers, say, [self._give_up(peers, failed.entry, result.reason, say)])

    def _newest_after(self, peers: Peers, say: Callable[[str], None], tried: list[str]) -> Target:
        """The newest verified position; `tried` are reasons so far."""
        while True:
            newest = decide(peers, "newest epoch", self._newest)
            if newest is None:
                raise NoProvableEpochError(
                    f"no epoch in {self.storage.url} can be verified "
                    f"({'; '.join(tried) or 'none is left'}): restore the files from a copy"
                )
            entry = entry_of(newest["entry"], "the log")
            result = self._verify_jointly(peers, entry)
            if result.outcome is not VerificationStatus.DAMAGED:
                target = self._target(entry, result)
                if newest["passed"]:  # the new branch keeps the request, so that the same command continues
                    request = decide(peers, "fallback", lambda: dict(self.required().view.begun_by or {}))
                    self.rewind(peers, entry.position, {**request, "fallback": True})
                return target
            tried.append(self._give_up(peers, entry, result.reason, say))

    def _verify_jointly(self, peers: Peers, entry: CommittedPosition) -> JointResult:
        return verify_together(peers, self.storage, entry)

    def _give_up(
        self, peers: Peers, entry: CommittedPosition, reason: str, say: Callable[[str], None]
    ) -> str:
        say(f"epoch {entry.position} is damaged ({reason}); an older one is used instead")

        def quarantine() -> None:
            self.required().quarantine(entry.key, reason)

        decide(peers, "quarantine", quarantine)
        return f"epoch {entry.position}: {reason}"

    def _newest(self) -> Any:
        """The newest entry to try, and whether quarantined ones of its branch follow it."""
        view = self.required().view
        newest = view.newest()
        if newest is None:
            return None
        return {"entry": entry_json(newest), "passed": view.line()[-1].key != newest.key}

    def _target(self, entry: CommittedPosition, result: JointResult) -> Target:
        """The verified position with its manifest: a second read could fail on one rank alone."""
        if result.manifest is None:
            raise StorageError(
                f"epoch {entry.position} in {self.storage.url} cannot be read now: {result.reason}; nothing "
                "was changed: try again when the storage answers"
            )
        self._verified = Target(entry, result.manifest, result.shards)
        return self._verified


def let_go(writer: LogWriter, what: str) -> None:
    """Release a log; warns if that fails."""
    try:
        writer.release()
    except FencedError:
        pass  # another job has it and need not wait for us
    except (RelayError, OSError) as error:
        warn(f"{what} was not released: {error}", stacklevel=2)
