"""Apply retention: rules for the epochs to keep, their deletion, and the deletion of leftovers.

A policy chooses which epochs of the current line to keep; `|` keeps what either keeps. Never deleted are: the
newest verifiable entry, tagged and pinned ones, attempts that an entry or a save in flight needs, and
abandoned epochs that the current branch has not passed yet. Of mid-epoch positions beyond the newest whole
epoch, from which a job resumes, as many of the newest stay as epochs do.

`retire` is durable in the log before files are deleted, so an interrupted deletion is found in the log and
finished. Orphans are identified by the log alone, never by age. Large deletions are slow: callers wait only
if they need the space or release the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from functools import reduce
from operator import or_
from typing import Any

from torchrelay.checkpoint.format.names import ATTEMPT_NAME, DATA, attempt_directory, parse_shard_file_name
from torchrelay.checkpoint.format.position import DAMAGED, CommittedPosition, Key, Retirement, State
from torchrelay.checkpoint.log import state as changes
from torchrelay.checkpoint.log.state import protected
from torchrelay.checkpoint.log.view import LogView, best_first, needed_by
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.records import dataclass


class RetentionPolicy:
    """Chooses entries of the current line to keep."""

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        """The keys to keep among whole epochs, oldest first."""
        raise NotImplementedError

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        return _Either(self, other)


@dataclass(frozen=True)
class _Either(RetentionPolicy):
    one: RetentionPolicy
    other: RetentionPolicy

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        return self.one.keep(line) | self.other.keep(line)


@dataclass(frozen=True)
class _KeepLast(RetentionPolicy):
    count: int

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in _resumable(line)[-self.count :])


@dataclass(frozen=True)
class Scores:
    """A metric of epochs by attempt. `unread` are attempts with unreadable metrics: any may be the best."""

    values: Mapping[str, float]
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _KeepBest(RetentionPolicy):
    scores: Scores
    mode: str
    count: int

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        best = best_first([entry for entry in line if entry.healthy], self.scores.values, self.mode)
        if not best:
            return keep_all().keep(line)
        unread = [entry for entry in line if entry.healthy and entry.attempt_name in self.scores.unread]
        return frozenset(entry.key for entry in (*best[: self.count], *unread))


@dataclass(frozen=True)
class _EveryNEpochs(RetentionPolicy):
    epochs: int

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in line if entry.position.epoch % self.epochs == 0)


@dataclass(frozen=True)
class _KeepAll(RetentionPolicy):
    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in line)


def keep_last(count: int) -> RetentionPolicy:
    """Keep the newest `count` epochs that a job may resume from (at least 1)."""
    return _KeepLast(_positive(count, "keep_last"))


def every_n_epochs(epochs: int) -> RetentionPolicy:
    """Keep every epoch whose number is a multiple of `epochs` (at least 1), epoch 0 included."""
    return _EveryNEpochs(_positive(epochs, "every_n_epochs"))


def keep_best(scores: Scores, mode: str, count: int = 1) -> RetentionPolicy:
    """Keep the `count` healthy epochs (at least 1) with the best scores; `mode` is "max" or "min".

    Zero is a score like any other. An epoch without a finite score is never among the best; the earlier one
    wins a tie. If no epoch has a score, all stay.
    """
    if mode not in ("max", "min"):
        raise UsageError(f"keep_best: invalid direction {mode!r}: expected 'max' or 'min'")
    return _KeepBest(scores, mode, _positive(count, "keep_best"))


def keep_all() -> RetentionPolicy:
    """Keep every epoch of the current line; only passed abandoned ones are deleted."""
    return _KeepAll()


def to_retire(
    view: LogView, policy: RetentionPolicy, in_flight: Collection[str] = (), inside: int | None = None
) -> tuple[Retirement, ...]:
    """What to retire now, oldest first. `in_flight` are attempts that a save in flight references.

    `inside`: how many positions stay of the running epoch, None for all. Damaged entries stay as evidence
    until a newer entry can be resumed from.
    """
    kept = policy.keep(whole_epochs(view)) | protected(view.state)
    running = [entry for entry in view.line() if not _over(entry, view)]
    places = [entry for entry in _resumable(tuple(running)) if not entry.position.boundary]
    if inside is not None and len(places) > inside:
        running = [entry for entry in running if entry.position >= places[-inside].position]
    kept |= {entry.key for entry in running}
    kept |= {entry.key for entry in view.abandoned() if not _passed(entry, view)}
    needed = needed_by(
        view, {entry.attempt_name for entry in view.entries if entry.key in kept} | set(in_flight)
    )
    return tuple(Retirement(entry.attempt_name) for entry in view.entries if entry.attempt_name not in needed)


def whole_epochs(view: LogView) -> tuple[CommittedPosition, ...]:
    """Entries at the ends of epochs that the current branch sees, oldest first."""
    return tuple(entry for entry in view.line() if entry.position.boundary)


def _over(entry: CommittedPosition, view: LogView) -> bool:
    """Whether a newer whole epoch of the line can be resumed from."""
    newest = view.newest(boundary=True)
    return newest is not None and newest.position > entry.position


def _passed(entry: CommittedPosition, view: LogView) -> bool:
    """Whether the current branch, beyond its base, has gone further than an abandoned entry."""
    own = [one.position for one in view.candidates() if one.branch == view.current.id]
    return bool(own) and own[0] > entry.position


def _resumable(line: tuple[CommittedPosition, ...]) -> list[CommittedPosition]:
    """Entries that a job may resume from."""
    return [entry for entry in line if entry.healthy and entry.resumable]


def _positive(value: int, name: str) -> int:
    """Raise UsageError unless a whole number from 1."""
    if type(value) is not int or value < 1:
        raise UsageError(f"invalid {name}({value!r}): expected a whole number from 1")
    return value


OPTIMIZER = "optim"
BestEpochs = tuple[str, str] | tuple[str, str, int] | None
"""User's form of `Best`: `("val/acc", "max")`, or `("val/acc", "max", 3)` for the best three."""


@dataclass(frozen=True)
class Best:
    """The `count` best epochs by a metric; `mode` is "max" or "min"."""

    metric: str
    mode: str
    count: int = 1

    @classmethod
    def of(cls, given: Any) -> Best | None:
        """The option as `Best`, see `BestEpochs`; raises UsageError."""
        if given is None:
            return None
        if isinstance(given, tuple) and len(given) in (2, 3):
            metric, mode, count = (*given, 1)[:3]
            good = isinstance(metric, str) and metric and mode in ("max", "min")
            if good and type(count) is int and count >= 1:
                return cls(metric, mode, count)
        raise UsageError(
            f"invalid keep_best={given!r:.80}: expected a metric, a direction, and optionally how many "
            "epochs, for example ('val/acc', 'max') or ('val/acc', 'max', 3)"
        )

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}" + (f":{self.count}" if self.count > 1 else "")


@dataclass(frozen=True)
class Keeping:
    """Retention rules: an epoch stays if at least one rule keeps it; without rules all stay.

    Attributes:
        last: newest epochs to keep.
        every: keep each epoch whose number is a multiple of this.
        best: best epochs by a metric of the current branch; keeps all without its scores.
        optimizer_last: newest kept epochs that keep their optimizer; older ones cannot be resumed from.
            Marked epochs keep all.
        without: epochs of the current line to delete, and nothing else.

    Raises UsageError for anything but whole numbers from 1.
    """

    last: int | None = None
    every: int | None = None
    optimizer_last: int | None = None
    best: Best | None = None
    scores: Scores | None = field(default=None, compare=False)
    without: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, count in (
            ("keep_last", self.last),
            ("keep_every", self.every),
            ("keep_optimizer_last", self.optimizer_last),
        ):
            if count is not None and (type(count) is not int or count < 1):
                raise UsageError(
                    f"invalid {name}={count!r}: expected a whole number from 1 (None keeps all epochs)"
                )

    @property
    def policy(self) -> RetentionPolicy:
        """The policy for epochs of the line, with or without their optimizer."""
        wanted: list[RetentionPolicy] = []
        if self.last is not None:
            wanted.append(_NewestHealthy(self.last))
        if self.every is not None:
            wanted.append(every_n_epochs(self.every))
        if self.best is not None and self.scores is not None:
            wanted.append(keep_best(self.scores, self.best.mode, self.best.count))
        elif self.best is not None:
            wanted.append(keep_all())
        return reduce(or_, wanted) if wanted else keep_all()

    @property
    def rule(self) -> str:
        """The rules, as stored in the records."""
        asked_for = (("keep_last", self.last), ("keep_every", self.every), ("keep_best", self.best))
        asked = [f"{name}={value}" for name, value in asked_for if value is not None]
        if self.without:
            return f"epoch {', '.join(map(str, self.without))} was named"
        return ", ".join(asked) or "abandoned epochs are deleted once the branch has passed them"

    def chosen(
        self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()
    ) -> tuple[Retirement, ...]:
        """Epochs to delete. `suspects` are unverified entries: none of them lets older ones be deleted.

        `needed` are attempts that stay under any rule.
        """
        if not self.without:
            return to_retire(_suspecting(view, suspects), self.policy, needed, self.last)
        named = [entry for entry in whole_epochs(view) if entry.position.epoch in self.without]
        return tuple(Retirement(entry.attempt_name) for entry in named if entry.attempt_name not in needed)

    def chosen_optimizers(
        self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()
    ) -> tuple[Retirement, ...]:
        """Epochs that lose their optimizer."""
        if self.optimizer_last is None:
            return ()
        found = optimizers_to_retire(_suspecting(view, suspects), self.optimizer_last)
        return tuple(one for one in found if one.attempt_name not in needed)

    def after(self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()) -> State:
        """The state of a log after `retire`; changes nothing."""
        state, _ = changes.retired(view.state, self.chosen(view, suspects, needed))
        thinner = self.chosen_optimizers(replace(view, state=state), suspects, needed)
        return changes.retired(state, thinner)[0]

    def retire(self, writer: LogWriter, suspects: Collection[Key] = (), needed: Collection[str] = ()) -> None:
        """Retire epochs durably in the log; deletes no files. Raises FencedError and StorageError."""
        writer.retire(lambda view: self.chosen(view, suspects, needed), self.rule)
        if self.optimizer_last is not None:
            rule = f"keep_optimizer_last={self.optimizer_last}"
            writer.retire(lambda view: self.chosen_optimizers(view, suspects, needed), rule)


KEEP_ALL = Keeping()


def _suspecting(view: LogView, suspects: Collection[Key]) -> LogView:
    """The view in which suspects count as damaged."""
    if not suspects:
        return view
    entries = tuple(
        replace(one, health=DAMAGED) if one.key in suspects and one.healthy else one for one in view.entries
    )
    return replace(view, state=replace(view.state, entries=entries))


@dataclass(frozen=True)
class _NewestHealthy(RetentionPolicy):
    """The newest epochs that are not damaged, including those that lost their optimizer to retention."""

    count: int

    def keep(self, line: tuple[CommittedPosition, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in [one for one in line if one.healthy][-self.count :])


def optimizers_to_retire(view: LogView, count: int) -> tuple[Retirement, ...]:
    """Optimizer groups of whole epochs older than the newest `count` that can be resumed from.

    Not those of marked and damaged epochs, of epochs whose files another one needs, of epochs without other
    files, and of abandoned branches.
    """
    resumable = [entry for entry in whole_epochs(view) if entry.healthy and entry.resumable]
    spared = protected(view.state) | {entry.key for entry in resumable[-count:]}
    needed = {name for entry in view.entries for name in entry.needs}
    return tuple(
        Retirement(entry.attempt_name, (OPTIMIZER,))
        for entry in resumable
        if entry.key not in spared
        and entry.attempt_name not in needed
        and OPTIMIZER in entry.groups
        and len(entry.groups) > 1
    )


@dataclass(frozen=True)
class Swept:
    """Result of a sweep."""

    retired: tuple[Retirement, ...] = ()
    deleted: tuple[Retirement, ...] = ()
    orphans: tuple[str, ...] = ()


def sweep(writer: LogWriter, policy: RetentionPolicy, in_flight: Collection[str] = ()) -> Swept:
    """Retire by policy, then delete retired files and leftovers of older generations.

    Raises FencedError, and StorageError when a deletion failed: the next sweep continues.
    """
    retired = writer.retire(lambda view: to_retire(view, policy, in_flight))
    return Swept(retired, *delete_left(writer))


def delete_left(writer: LogWriter) -> tuple[tuple[Retirement, ...], tuple[str, ...]]:
    """Delete all retired files and orphans of the log. Raises StorageError."""
    return delete_retired(writer), delete_orphans(writer)


def delete_retired(
    writer: LogWriter, deleted: Callable[[Retirement], None] | None = None
) -> tuple[Retirement, ...]:
    """Finish the deletion of everything that the log lists as retired; `deleted` is called after each."""
    retiring = writer.undeleted
    for one in retiring:
        delete_attempt(writer.storage, one)
        if deleted is not None:
            deleted(one)
    if retiring:
        writer.storage.sync_dir(DATA)
        writer.forget(retiring)
    return retiring


def delete_orphans(writer: LogWriter) -> tuple[str, ...]:
    """Delete attempts that existed before our takeover and that the log does not know.

    Their generations are older than ours, so they can never be committed. Nothing is deleted while damage
    hides a part of the log: such an attempt may be a committed one.
    """
    if not writer.certain:
        return ()
    view = writer.view
    known = view.state.tries | {one.attempt_name for one in view.retiring}
    orphans = tuple(sorted(name for name in writer.older_attempts - known if ATTEMPT_NAME.fullmatch(name)))
    failed: dict[str, StorageError] = {}
    for name in orphans:
        try:
            delete_attempt(writer.storage, Retirement(name))
        except StorageError as error:  # one failure must not prevent the others
            failed[name] = error
    if orphans:
        writer.storage.sync_dir(DATA)
    writer.older_attempts = frozenset(failed)
    for failure in failed.values():
        raise failure
    return orphans


def _group_of(file_name: str) -> str | None:
    """The group of a shard file; None for a manifest, stats or anything else."""
    try:
        return parse_shard_file_name(file_name).group
    except DamagedError:
        return None


def files_of(storage: Storage, one: Retirement) -> tuple[str, ...]:
    """The existing files that a retirement deletes."""
    directory = attempt_directory(one.attempt_name)
    names = storage.list(directory)
    return tuple(
        f"{directory}/{name}" for name in names if one.groups is None or _group_of(name) in one.groups
    )


def delete_attempt(storage: Storage, one: Retirement) -> None:
    """Delete the files of a retirement. Raises StorageError."""
    for path in files_of(storage, one):
        storage.delete(path)
    if one.groups is None:
        storage.delete(attempt_directory(one.attempt_name))
