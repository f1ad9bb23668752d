"""Retention on demand: what rules would give up of a run that nobody writes to, and giving it up.

What is said beforehand and what is done come from the same functions. As in training, an epoch that stays
is proved first, the log says durably what goes, and only then files are deleted; what an interruption left
of them is found in the log and goes the next time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from torchrelay.checkpoint.coordinator.retention import KnownMetrics, Lasting
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Retirement, State
from torchrelay.checkpoint.load.verify import VerificationStatus
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import PATIENCE_SECS
from torchrelay.checkpoint.log.retention import Keeping, delete_retired, files_of, whole_epochs
from torchrelay.checkpoint.log.state import protected
from torchrelay.checkpoint.log.tiered_storage import only_near, refuse_part
from torchrelay.checkpoint.log.view import LogView, ranges
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.errors import StorageError, UnknownEpochError, UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Loss:
    """One deletion. `entry` is the epoch whose files these are, None where it was given up before.

    `groups` None: all files of the try. `nbytes` is what lies there now.
    """

    retirement: Retirement
    entry: CommittedPosition | None
    nbytes: int

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The groups of files that go; None: all."""
        return self.retirement.groups


@dataclass(frozen=True)
class Pruned:
    """What goes, oldest epoch first, and the log before and after. `doubts` are for people."""

    losses: tuple[Loss, ...]
    before: LogView
    after: LogView
    doubts: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are freed."""
        return sum(loss.nbytes for loss in self.losses)


def plan_pruning(storage: Storage, view: LogView, keeping: Keeping) -> Pruned:
    """What `prune` would do to a log as it was read; changes nothing.

    Raises UsageError for one of several near directories that make up the epochs; UnknownEpochError where
    nothing is committed, or no epoch has the metric of `keeping.best`; StorageError where what is to stay
    cannot be looked at now.
    """
    refuse_part(storage)
    if view.empty and not view.retiring:
        raise UnknownEpochError(f"nothing is committed in {storage.url}")
    keeping, suspects, doubts = _decided(storage, view, keeping)
    after = replace(view, state=keeping.after(view, suspects, only_near(storage, view)))
    return Pruned(tuple(_losses(storage, view, after.state)), view, after, doubts)


def prune(storage: Storage, keeping: Keeping, *, patience_secs: float = PATIENCE_SECS) -> Pruned:
    """Give up what no rule keeps, and delete it; returns what went.

    Takes the log over unless there is nothing to do: DirectoryInUseError where its writer lives. Raises
    what `plan_pruning` raises, before anything is changed; StorageError where a deletion failed, and then
    the log knows what is still to go.
    """
    planned = plan_pruning(storage, open_log(storage), keeping)
    if not planned.losses:
        return planned
    check_exclusion(storage)
    writer = LogWriter.take(storage, planned.before.job_name, patience_secs=patience_secs)
    try:  # planned again, for somebody may have written before we took over; marks of guests still count
        before = writer.view
        keeping, suspects, doubts = _decided(storage, before, keeping)
        keeping.retire(writer, suspects, only_near(storage, before))
        losses = tuple(_losses(storage, before, writer.view.state))
        delete_retired(writer)
        return Pruned(losses, before, writer.view, doubts)
    finally:
        writer.release()


def _check_named(view: LogView, epochs: Collection[int]) -> None:
    """Refuse epochs that are not there, that never go, or whose files another epoch needs."""
    entries = {entry.position.epoch: entry for entry in whole_epochs(view)}
    if unknown := [number for number in epochs if number not in entries]:
        raise UnknownEpochError(
            f"epoch {unknown[0]} is not among the committed ones ({ranges(list(entries)) or 'none'})"
        )
    named = [entries[number] for number in epochs]
    going = {entry.key for entry in named}
    for entry in named:
        number = entry.position.epoch
        if entry.key in view.state.marked:
            raise UsageError(f"epoch {number} is tagged or pinned: remove the mark first")
        if entry.key in protected(view.state):
            raise UsageError(f"epoch {number} is the newest that can be resumed from, which always stays")
        needing = [one for one in view.entries if entry.try_name in one.needs and one.key not in going]
        if needing:
            more = ", ".join(str(one.position) for one in needing[:4])
            raise UsageError(f"epoch {number} stays: epoch {more} uses files of it; give that up first")


def _decided(
    storage: Storage, view: LogView, keeping: Keeping
) -> tuple[Keeping, frozenset[Key], tuple[str, ...]]:
    """The rules with the metrics that they ask for; newest epochs that are no reason to let older ones go.

    A metric that no epoch has is a mistake of the user's.
    """
    _check_named(view, keeping.without)
    doubts: list[str] = []
    if keeping.best is not None:
        metrics = KnownMetrics()
        metrics.look(storage, view)
        if missing := metrics.missing(keeping.best):
            raise UnknownEpochError(f"{missing}: nothing is deleted")
        doubts += metrics.doubts(keeping.best)
        keeping = metrics.told(keeping)
    proofs = Lasting().unproved(storage, view)
    for proof in proofs:
        if proof.outcome is VerificationStatus.UNKNOWN:
            raise StorageError(
                f"{proof.told}: older epochs go only for one that is proved, so nothing is deleted; try "
                "again when the storage answers"
            )
    doubts += [f"{proof.told}: older ones stay in its place" for proof in proofs]
    return keeping, frozenset(proof.entry.key for proof in proofs), tuple(doubts)


def _losses(storage: Storage, before: LogView, after: State) -> Iterator[Loss]:
    entries = {entry.try_name: entry for entry in before.entries}
    for one in sorted(after.retiring, key=lambda one: (one.try_name, one.groups or ())):
        entry = None if one in before.retiring else entries.get(one.try_name)
        yield Loss(one, entry, sum(storage.stat(path) or 0 for path in files_of(storage, one)))
