"""Retention as the engine applies it: the log says what goes, then files go behind the training.

On demand, of a run that nobody writes to, what is said beforehand and what is done come from the same
functions. As in training, an epoch that stays is proved first, the log says durably what goes, and only then
files are deleted; what an interruption left of them is found in the log and goes the next time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field, replace

from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Retirement, State
from torchrelay.checkpoint.load.verify import Proof, Share, VerificationStatus, prove
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
from torchrelay.checkpoint.log.writer import LogWriter, is_left
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.errors import StorageError, UnknownEpochError, UsageError
from torchrelay.jobs.session import Peers, decide, warn
from torchrelay.records import dataclass

LOOKED_AT = 64
"""Holders of files that one look opens at most: a header costs a read, and the training may wait for it."""


class Lasting:
    """Proves the newest epochs up to their headers, before each retirement.

    Where an epoch lies in the files of more than `LOOKED_AT` nodes a share of them is looked at, another
    one each time. The bytes themselves are not read: that is for whoever loads them, and for `verify`.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._nodes: int | None = None
        """How many nodes the last epoch had that was looked at."""

    def unproved(
        self, storage: Storage, view: LogView, unseen: frozenset[str] = frozenset()
    ) -> tuple[Proof, ...]:
        """Of the positions that a job may resume from the newest that are not proved, up to one that is.

        `unseen` are tries of which not all files are to be seen from here; nothing is said of them.
        Up to one that cannot be read, too, which is then the last: a storage that is away may keep each look
        waiting for minutes, and the other processes with it.
        """
        found: list[Proof] = []
        for entry in view.candidates(boundary=True):
            if entry.try_name in unseen:
                continue
            proof = self._look(storage, entry)
            if proof.proved:
                break
            found.append(proof)
            if proof.outcome is VerificationStatus.UNKNOWN:
                break
        return tuple(found)

    def _look(self, storage: Storage, entry: CommittedPosition) -> Proof:
        if self._nodes is None:
            self._remember(prove(storage, entry, want=()))
        shares = max(1, -(-(self._nodes or 1) // LOOKED_AT))
        self._turn += 1
        proof = prove(storage, entry, share=Share(self._turn % shares, shares))
        self._remember(proof)
        return proof

    def _remember(self, proof: Proof) -> None:
        if proof.manifest is not None:
            self._nodes = len(proof.manifest.world.nodes)


_EXPECTED = 3
"""So many positions may well have no metrics: the first state, and epochs that were not evaluated."""


class KnownMetrics:
    """Metrics of the healthy whole epochs of the current branch, as far as they were read."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, float]] = {}
        self._unread: dict[CommittedPosition, OSError] = {}

    def look(self, storage: Storage, view: LogView) -> None:
        """Read what is not known yet; what cannot be read is asked for again the next time."""
        line = [entry for entry in view.line() if entry.position.boundary and entry.healthy]
        self._known = {one.try_name: self._known[one.try_name] for one in line if one.try_name in self._known}
        self._unread = {}
        for entry in line:
            if entry.try_name in self._known:
                continue
            try:
                self._known[entry.try_name] = codec.read(storage, entry).facts.metrics
            except OSError as error:
                self._unread[entry] = error

    def told(self, keeping: Keeping) -> Keeping:
        """The same rules, knowing the scores that they ask for."""
        if keeping.best is None:
            return keeping
        unread = frozenset(entry.try_name for entry in self._unread)
        return replace(keeping, scores=Scores(self._values(keeping.best), unread))

    def missing(self, best: Best) -> str:
        """Why no epoch is the best, for people; empty where one is."""
        if self._unread or any(map(math.isfinite, self._values(best).values())):
            return ""
        names = sorted({name for found in self._known.values() for name in found})
        there = ", ".join(names) or "none at all"
        return f"no epoch has a finite value of metric {best.metric!r}; there is {there}"

    def doubts(self, best: Best) -> Iterator[str]:
        """What keeps epochs that might have to go, for people."""
        if len(self._known) > _EXPECTED and (missing := self.missing(best)):
            yield f"{missing}: as long as none is known to be the best, all stay"
        for entry, error in self._unread.items():
            yield f"epoch {entry.position} may be the best and stays: its metrics cannot be read ({error})"

    def _values(self, best: Best) -> dict[str, float]:
        return {name: found[best.metric] for name, found in self._known.items() if best.metric in found}


@dataclass(frozen=True)
class Retaining:
    """Carries `keeping` out in the directory of `ledger`; on other ranks than 0 there is nothing to do."""

    ledger: Ledger
    keeping: Keeping
    lasting: Lasting = field(default_factory=Lasting)
    metrics: KnownMetrics = field(default_factory=KnownMetrics)
    told: set[str] = field(default_factory=set)
    """Doubts that people have heard of."""

    def now(self, peers: Peers) -> None:
        """Say in the log what goes. All processes together: FencedError when another job has the log."""
        if self.keeping != KEEP_ALL:
            decide(peers, "save: retention", self._retire)

    def behind(self) -> None:
        """Say so behind the training too, for that waits for the disk; being fenced is found out later.

        No save in flight can need what goes: it refers to nothing but what the newest entry keeps.
        """
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
        """Give back the space of what earlier generations left; tell of deletions that failed."""
        self.ledger.tell_failed_deletions()
        writer = self.ledger.writer
        if writer is not None and is_left(writer):
            self._ask("unfinished tries", lambda: delete_left(writer))

    def end(self, peers: Peers) -> None:
        """Return when all is deleted. All processes together: FencedError when another job has the log."""
        if self.keeping == KEEP_ALL:
            self.delete_left()  # positions inside the last epoch, which its commit has passed
            self.ledger.finish_deletions()
        else:
            decide(peers, "save: retention ended", self._end)

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
        """Give up what may go, as long as an epoch that stays is proved; returns doubts, for people."""
        view, keeping, doubts = writer.view, self.keeping, list[str]()
        if keeping.best is not None:
            self.metrics.look(self.ledger.storage, view)
            doubts += [one for one in self.metrics.doubts(keeping.best) if one not in self.told]
            self.told.update(doubts)
            keeping = self.metrics.told(keeping)
        if not (keeping.chosen(view) or keeping.chosen_optimizers(view)):
            return "; ".join(doubts)  # nothing goes, so nothing need be proved
        unproved = self.lasting.unproved(self.ledger.storage, view, self.ledger.unseen())
        if not any(proof.outcome is VerificationStatus.UNKNOWN for proof in unproved):
            suspects: frozenset[Key] = frozenset(proof.entry.key for proof in unproved)
            keeping.retire(writer, suspects, self.ledger.needed())
        if unproved:
            doubts.append(f"{'; '.join(proof.told for proof in unproved)}: older ones stay in its place")
        return "; ".join(doubts)

    def at_once(self, writer: LogWriter) -> str:
        """Say what goes, and delete it, in the calling thread; returns doubts, for people."""
        unsure = "" if self.keeping == KEEP_ALL else self._retire_but(writer)
        delete_left(writer)
        return unsure

    def _end(self) -> None:
        self.ledger.finish_deletions()
        if self.ledger.writer is not None:
            self.ledger.writer.check()

    def _ask(self, what: str, work: Callable[[], object]) -> None:
        self.ledger.deletions.ask(f"{what} could not be deleted", work)


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
    from torchrelay.checkpoint.log.tiered_storage import only_near, refuse_part

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
    from torchrelay.checkpoint.log.tiered_storage import only_near

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
