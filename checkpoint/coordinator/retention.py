"""Apply retention for the engine: commit what is deleted to the log, then delete files in the background.

The same functions report and perform a prune of a run without a writer. As in training, an epoch that stays
is verified first, the log durably retires others, and only then files are deleted. An interrupted deletion is
in the log and is finished the next time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Retirement, State
from torchrelay.checkpoint.load.verify import Share, Verification, VerificationStatus, verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import PATIENCE_SECS
from torchrelay.checkpoint.log.retention import (
    KEEP_ALL,
    Best,
    Keeping,
    Scores,
    delete_left,
    delete_retired,
    files_of,
    whole_epochs,
)
from torchrelay.checkpoint.log.state import protected
from torchrelay.checkpoint.log.view import LogView, ranges
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.checkpoint.storage.work import progress
from torchrelay.errors import StorageError, UnknownEpochError, UsageError
from torchrelay.jobs.session import Peers, decide, warn
from torchrelay.records import dataclass

LOOKED_AT = 64
"""Holders whose files one call opens at most: each header costs a read, for which training may wait."""


class Lasting:
    """Verifies the headers of the newest epochs before each retirement.

    At most `LOOKED_AT` nodes' files are read per call; larger epochs are checked in rotation. Blocks are
    verified only by loads and by `verify`.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._nodes: int | None = None
        """Number of nodes of the last epoch that was checked."""

    def unproved(
        self, storage: Storage, view: LogView, unseen: frozenset[str] = frozenset()
    ) -> tuple[Verification, ...]:
        """The newest resumable positions that are not verified, up to one that is.

        `unseen` are attempts that are not completely visible here; they are skipped. A position that cannot
        be read ends the search too, because an unavailable storage may delay each check, and all processes,
        for minutes.
        """
        found: list[Verification] = []
        for entry in view.candidates(boundary=True):
            if entry.attempt_name in unseen:
                continue
            result = self._look(storage, entry)
            if result.verified:
                break
            found.append(result)
            if result.outcome is VerificationStatus.UNKNOWN:
                break
        return tuple(found)

    def _look(self, storage: Storage, entry: CommittedPosition) -> Verification:
        """Verify a share of an epoch's headers, another one at each call."""
        if self._nodes is None:
            self._remember(verify_epoch(storage, entry, want=()))
        shares = max(1, -(-(self._nodes or 1) // LOOKED_AT))
        self._turn += 1
        result = verify_epoch(storage, entry, share=Share(self._turn % shares, shares))
        self._remember(result)
        return result

    def _remember(self, result: Verification) -> None:
        if result.manifest is not None:
            self._nodes = len(result.manifest.world.nodes)


_EXPECTED = 3
"""Number of positions that usually have no metrics: the first state, and epochs without evaluation."""


class KnownMetrics:
    """Cached metrics of the healthy whole epochs of the current branch."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, float]] = {}
        self._unread: dict[CommittedPosition, OSError] = {}

    def look(self, storage: Storage, view: LogView) -> None:
        """Read metrics that are not cached yet; unreadable ones are retried the next time."""
        line = [entry for entry in view.line() if entry.position.boundary and entry.healthy]
        self._known = {
            one.attempt_name: self._known[one.attempt_name] for one in line if one.attempt_name in self._known
        }
        self._unread = {}
        for entry in line:
            if entry.attempt_name in self._known:
                continue
            try:
                self._known[entry.attempt_name] = codec.read(storage, entry).facts.metrics
            except OSError as error:
                self._unread[entry] = error

    def scored(self, keeping: Keeping) -> Keeping:
        """The same rules with the scores that they need."""
        if keeping.best is None:
            return keeping
        unread = frozenset(entry.attempt_name for entry in self._unread)
        return replace(keeping, scores=Scores(self._values(keeping.best), unread))

    def missing(self, best: Best) -> str:
        """Why no epoch is the best, for messages; empty if one is."""
        if self._unread or any(map(math.isfinite, self._values(best).values())):
            return ""
        names = sorted({name for found in self._known.values() for name in found})
        there = ", ".join(names) or "no metric"
        return f"no epoch has a finite value of metric {best.metric!r} (found: {there})"

    def doubts(self, best: Best) -> Iterator[str]:
        """Warnings about epochs that are kept because their metrics are unknown."""
        if len(self._known) > _EXPECTED and (missing := self.missing(best)):
            yield f"{missing}: all epochs stay as long as none is known to be the best"
        for entry, error in self._unread.items():
            yield f"epoch {entry.position} may be the best and stays: its metrics cannot be read ({error})"

    def _values(self, best: Best) -> dict[str, float]:
        """Finite values of the metric by attempt."""
        return {name: found[best.metric] for name, found in self._known.items() if best.metric in found}


@dataclass(frozen=True)
class Retaining:
    """Applies `keeping` in the directory of `ledger`; does nothing on other ranks than 0."""

    ledger: Ledger
    keeping: Keeping
    lasting: Lasting = field(default_factory=Lasting)
    metrics: KnownMetrics = field(default_factory=KnownMetrics)
    shown: set[str] = field(default_factory=set)
    """Warnings already shown."""

    def now(self, peers: Peers) -> None:
        """Retire epochs in the log. All processes together: FencedError when another job has the log."""
        if self.keeping != KEEP_ALL:
            decide(peers, "save: retention", self._retire)

    def in_background(self) -> None:
        """Retire in the background: no save in flight needs them. Fencing is detected later."""
        writer = self.ledger.writer
        if writer is None or self.keeping == KEEP_ALL:
            return

        def work() -> None:
            unsure = self._retire_but(writer)
            delete_left(writer)
            if unsure:
                raise StorageError(unsure)

        self._ask("old epochs", work)

    def delete_left(self) -> None:
        """Delete leftovers of earlier generations; report deletions that failed."""
        self.ledger.tell_failed_deletions()
        writer = self.ledger.writer
        if writer is not None and writer.has_leftovers:
            self._ask("unfinished tries", lambda: delete_left(writer))

    def end(self, peers: Peers) -> None:
        """Return when all is deleted. All processes together: FencedError when another job has the log."""
        if self.keeping == KEEP_ALL:
            self.delete_left()  # positions inside the last epoch, completed by its commit
            self.ledger.finish_deletions()
            return

        def end() -> None:
            self.ledger.finish_deletions()
            if self.ledger.writer is not None:
                self.ledger.writer.check()

        decide(peers, "save: retention ended", end)

    def _retire(self) -> None:
        writer = self.ledger.writer
        if writer is None:
            return
        try:
            unsure = self._retire_but(writer)
        except StorageError as error:
            unsure = str(error)
        else:
            self._ask("old epochs", lambda: delete_left(writer))
        if unsure:
            warn(f"old epochs could not be deleted: {unsure}", stacklevel=2)

    def _retire_but(self, writer: LogWriter) -> str:
        """Retire epochs if one that stays is verified; returns warnings."""
        view, keeping, doubts = writer.view, self.keeping, list[str]()
        if keeping.best is not None:
            self.metrics.look(self.ledger.storage, view)
            doubts += [one for one in self.metrics.doubts(keeping.best) if one not in self.shown]
            self.shown.update(doubts)
            keeping = self.metrics.scored(keeping)
        if not (keeping.chosen(view) or keeping.chosen_optimizers(view)):
            return "; ".join(doubts)  # nothing is deleted, so nothing need be verified
        unproved = self.lasting.unproved(self.ledger.storage, view, self.ledger.unseen())
        if not any(result.outcome is VerificationStatus.UNKNOWN for result in unproved):
            suspects: frozenset[Key] = frozenset(result.entry.key for result in unproved)
            keeping.retire(writer, suspects, self.ledger.needed())
        if unproved:
            doubts.append(f"{'; '.join(result.summary for result in unproved)}: older ones stay instead")
        return "; ".join(doubts)

    def at_once(self, writer: LogWriter) -> str:
        """Retire and delete, in the calling thread; returns warnings."""
        unsure = "" if self.keeping == KEEP_ALL else self._retire_but(writer)
        delete_left(writer)
        return unsure

    def _ask(self, what: str, work: Callable[[], object]) -> None:
        self.ledger.deletions.ask(f"{what} could not be deleted", work)


@dataclass(frozen=True)
class Loss:
    """One deletion: `entry` is None if it was retired before, `nbytes` the current size of its files."""

    retirement: Retirement
    entry: CommittedPosition | None
    nbytes: int

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The groups of files to delete; None: all."""
        return self.retirement.groups


@dataclass(frozen=True)
class Pruned:
    """Deletions, oldest epoch first, and the log before and after. `doubts` are for display."""

    losses: tuple[Loss, ...]
    before: LogView
    after: LogView
    doubts: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are freed."""
        return sum(loss.nbytes for loss in self.losses)


def plan_pruning(storage: Storage, view: LogView, keeping: Keeping) -> Pruned:
    """Plan what `prune` would do to a log; changes nothing.

    Raises UsageError for one of several local directories that make up the epochs; UnknownEpochError without
    a commit, or if no epoch has the metric of `keeping.best`; StorageError if what is to stay cannot be read
    now.
    """
    from torchrelay.checkpoint.log.tiered_storage import only_local, refuse_part

    refuse_part(storage)
    if view.empty and not view.state.retiring:
        raise UnknownEpochError(f"nothing is committed in {storage.url}")
    keeping, suspects, doubts = _decided(storage, view, keeping)
    after = replace(view, state=keeping.after(view, suspects, only_local(storage, view)))
    return Pruned(tuple(_losses(storage, view, after.state)), view, after, doubts)


def prune(storage: Storage, keeping: Keeping, *, patience_secs: float = PATIENCE_SECS) -> Pruned:
    """Retire what no rule keeps, and delete it; returns what was deleted.

    Takes the log over unless there is nothing to do: DirectoryInUseError if its writer is alive. Raises as
    `plan_pruning` does, before anything is changed; StorageError if a deletion failed, which the log
    remembers.
    """
    from torchrelay.checkpoint.log.tiered_storage import only_local

    planned = plan_pruning(storage, open_log(storage), keeping)
    if not planned.losses:
        return planned
    check_exclusion(storage)
    writer = LogWriter.take(storage, planned.before.job_name, patience_secs=patience_secs)
    try:  # planned again, because the log may have changed before the takeover; guests' marks still count
        before = writer.view
        keeping, suspects, doubts = _decided(storage, before, keeping)
        keeping.retire(writer, suspects, only_local(storage, before))
        losses = tuple(_losses(storage, before, writer.view.state))
        sizes = {loss.retirement: loss.nbytes for loss in losses}
        with progress(f"deleting {len(losses)} epochs", sum(sizes.values())) as advance:
            delete_retired(writer, lambda one: advance(sizes.get(one, 0)))
        return Pruned(losses, before, writer.view, doubts)
    finally:
        writer.release()


def _decided(
    storage: Storage, view: LogView, keeping: Keeping
) -> tuple[Keeping, frozenset[Key], tuple[str, ...]]:
    """The rules with their metrics; and the newest epochs that do not let older ones be deleted.

    A metric that no epoch has is an error.
    """
    # Raise UsageError for epochs that do not exist, are protected, or are needed by another epoch.
    entries = {entry.position.epoch: entry for entry in whole_epochs(view)}
    if unknown := [number for number in keeping.without if number not in entries]:
        raise UnknownEpochError(
            f"epoch {unknown[0]} is not committed (epochs: {ranges(list(entries)) or 'none'})"
        )
    named = [entries[number] for number in keeping.without]
    going = {entry.key for entry in named}
    for entry in named:
        number = entry.position.epoch
        if entry.key in view.state.marked:
            raise UsageError(f"epoch {number} is tagged or pinned: remove the mark first")
        if entry.key in protected(view.state):
            raise UsageError(f"epoch {number} is the newest that can be resumed from, which always stays")
        needing = [one for one in view.entries if entry.attempt_name in one.needs and one.key not in going]
        if needing:
            more = ", ".join(str(one.position) for one in needing[:4])
            raise UsageError(f"epoch {number} stays: epoch {more} uses files of it; delete that one first")
    doubts: list[str] = []
    if keeping.best is not None:
        metrics = KnownMetrics()
        metrics.look(storage, view)
        if missing := metrics.missing(keeping.best):
            raise UnknownEpochError(f"{missing}: nothing is deleted")
        doubts += metrics.doubts(keeping.best)
        keeping = metrics.scored(keeping)
    results = Lasting().unproved(storage, view)
    for result in results:
        if result.outcome is VerificationStatus.UNKNOWN:
            raise StorageError(
                f"{result.summary}: older epochs are deleted only if a newer one is verified, so nothing is "
                "deleted; try again when the storage answers"
            )
    doubts += [f"{result.summary}: older ones stay instead" for result in results]
    return keeping, frozenset(result.entry.key for result in results), tuple(doubts)


def _losses(storage: Storage, before: LogView, after: State) -> Iterator[Loss]:
    entries = {entry.attempt_name: entry for entry in before.entries}
    for one in sorted(after.retiring, key=lambda one: (one.attempt_name, one.groups or ())):
        entry = None if one in before.state.retiring else entries.get(one.attempt_name)
        yield Loss(one, entry, sum(storage.stat(path) or 0 for path in files_of(storage, one)))
