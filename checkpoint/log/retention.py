"""Apply retention: rules for the epochs to keep, their deletion, and the deletion of leftovers.

Rules choose which epochs of the current line to keep. Never deleted are: the newest verifiable entry, tagged
and pinned ones, attempts that an entry or a save in flight needs, and abandoned epochs that the current
branch has not passed yet. Of mid-epoch positions beyond the newest whole epoch, from which a job resumes, as
many of the newest stay as epochs do.

`retire` is durable in the log before files are deleted, so an interrupted deletion is found in the log and
finished. Orphans are identified by the log alone, never by age. Large deletions are slow: callers wait only
if they need the space or release the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
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


@dataclass(frozen=True)
class Scores:
    """A metric of epochs by attempt. `unread` are attempts with unreadable metrics: any may be the best."""

    values: Mapping[str, float]
    unread: frozenset[str] = frozenset()


def whole_epochs(view: LogView) -> tuple[CommittedPosition, ...]:
    """Entries at the ends of epochs that the current branch sees, oldest first."""
    return tuple(entry for entry in view.line() if entry.position.boundary)


def _resumable(line: Iterable[CommittedPosition]) -> list[CommittedPosition]:
    return [entry for entry in line if entry.healthy and entry.resumable]


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
        best: best epochs by a metric of the current branch; the earlier one wins a tie. Keeps all without
            scores.
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

    def kept(self, line: Sequence[CommittedPosition]) -> frozenset[Key]:
        """Which whole epochs of the line at least one rule keeps. Zero is a score like any other."""
        healthy, kept = [entry for entry in line if entry.healthy], list[CommittedPosition]()
        if self.last is not None:
            kept += healthy[-self.last :]
        if self.every is not None:
            kept += [entry for entry in line if entry.position.epoch % self.every == 0]
        if self.best is not None:
            scores = self.scores or Scores({})
            best = best_first(healthy, scores.values, self.best.mode)
            unread = [entry for entry in healthy if entry.attempt_name in scores.unread]
            kept += [*best[: self.best.count], *unread] if best else line
        rules = (self.last, self.every, self.best)
        return frozenset(entry.key for entry in (line if rules == (None, None, None) else kept))

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
        """Epochs to delete, oldest first. `suspects` are unverified: none of them lets older ones be deleted.

        `needed` are attempts that stay under any rule. Damaged entries stay as evidence until a newer entry
        can be resumed from.
        """
        if self.without:
            named = [entry for entry in whole_epochs(view) if entry.position.epoch in self.without]
            return tuple(Retirement(one.attempt_name) for one in named if one.attempt_name not in needed)
        view = _suspecting(view, suspects)
        kept = self.kept(whole_epochs(view)) | protected(view.state)
        newest = view.newest(boundary=True)  # ends the epochs before it
        running = [one for one in view.line() if newest is None or one.position >= newest.position]
        places = [entry for entry in _resumable(running) if not entry.position.boundary]
        if self.last is not None and len(places) > self.last:
            running = [entry for entry in running if entry.position >= places[-self.last].position]
        kept |= {entry.key for entry in running}
        # An abandoned entry stays until the current branch, beyond its base, has gone further.
        own = [one.position for one in view.candidates() if one.branch == view.current.id]
        kept |= {entry.key for entry in view.abandoned() if not own or own[0] <= entry.position}
        stay = needed_by(view, {one.attempt_name for one in view.entries if one.key in kept} | set(needed))
        return tuple(Retirement(one.attempt_name) for one in view.entries if one.attempt_name not in stay)

    def chosen_optimizers(
        self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()
    ) -> tuple[Retirement, ...]:
        """Whole epochs, older than the newest ones that can be resumed from, that lose their optimizer.

        Not marked and damaged epochs, epochs whose files another one needs, epochs without other files, and
        abandoned branches.
        """
        if self.optimizer_last is None:
            return ()
        view = _suspecting(view, suspects)
        resumable = _resumable(whole_epochs(view))
        spared = protected(view.state) | {entry.key for entry in resumable[-self.optimizer_last :]}
        stay = {name for entry in view.entries for name in entry.needs}.union(needed)
        return tuple(
            Retirement(entry.attempt_name, (OPTIMIZER,))
            for entry in resumable
            if entry.key not in spared and entry.attempt_name not in stay
            if OPTIMIZER in entry.groups and len(entry.groups) > 1
        )

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
    if not suspects:
        return view
    entries = tuple(
        replace(one, health=DAMAGED) if one.key in suspects and one.healthy else one for one in view.entries
    )
    return replace(view, state=replace(view.state, entries=entries))


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
    if not writer.view.certain:
        return ()
    view = writer.view
    known = view.state.tries | {one.attempt_name for one in view.state.retiring}
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


def files_of(storage: Storage, one: Retirement) -> tuple[str, ...]:
    """The existing files that a retirement deletes."""
    directory = attempt_directory(one.attempt_name)
    found = []
    for name in storage.list(directory):
        with suppress(DamagedError):  # not a shard, such as the manifest: it goes with the whole attempt
            if one.groups is None or parse_shard_file_name(name).group in one.groups:
                found.append(f"{directory}/{name}")
    return tuple(found)


def delete_attempt(storage: Storage, one: Retirement) -> None:
    """Delete the files of a retirement. Raises StorageError."""
    for path in files_of(storage, one):
        storage.delete(path)
    if one.groups is None:
        storage.delete(attempt_directory(one.attempt_name))
