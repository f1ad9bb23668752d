"""Which entries to keep. Pure: policies over what the log says; nothing is deleted here.

A policy says what it wants kept of the current line; `|` keeps what either wants. Whatever the
policy, never retired are: the newest provable entry, tagged and pinned ones, tries that an entry
or a save in flight needs, and abandoned epochs that the current branch has not passed yet. Of mid-epoch
positions beyond the newest whole epoch (a job resumes from them) the newest stay, as many as epochs do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchrelay.checkpoint.format.log_state import Entry, Key, Retirement
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.changes import protected
from torchrelay.checkpoint.reading.epoch_choice import best_first
from torchrelay.errors import UsageError
from torchrelay.records import dataclass


class RetentionPolicy:
    """Chooses entries of the current line to keep."""

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        """The keys to keep among whole epochs, oldest first."""
        raise NotImplementedError

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        return _Either(self, other)


@dataclass(frozen=True)
class _Either(RetentionPolicy):
    one: RetentionPolicy
    other: RetentionPolicy

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        return self.one.keep(line) | self.other.keep(line)


@dataclass(frozen=True)
class _KeepLast(RetentionPolicy):
    count: int

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in _resumable(line)[-self.count :])


@dataclass(frozen=True)
class Scores:
    """A metric of epochs by try. `unread` are tries whose metrics nobody could read: each may be the best."""

    values: Mapping[str, float]
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _KeepBest(RetentionPolicy):
    scores: Scores
    mode: str
    count: int

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        best = best_first([entry for entry in line if entry.healthy], self.scores.values, self.mode)
        if not best:
            return keep_all().keep(line)
        unread = [entry for entry in line if entry.healthy and entry.try_name in self.scores.unread]
        return frozenset(entry.key for entry in (*best[: self.count], *unread))


@dataclass(frozen=True)
class _EveryNEpochs(RetentionPolicy):
    epochs: int

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in line if entry.position.epoch % self.epochs == 0)


@dataclass(frozen=True)
class _KeepAll(RetentionPolicy):
    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in line)


def keep_last(count: int) -> RetentionPolicy:
    """Keep the newest `count` epochs that a job may resume from (at least 1)."""
    return _KeepLast(_positive(count, "keep_last"))


def every_n_epochs(epochs: int) -> RetentionPolicy:
    """Keep every epoch whose number is a multiple of `epochs` (at least 1), epoch 0 included."""
    return _EveryNEpochs(_positive(epochs, "every_n_epochs"))


def keep_best(scores: Scores, mode: str, count: int = 1) -> RetentionPolicy:
    """Keep the `count` healthy epochs (at least 1) with the best scores; `mode` is "max" or "min".

    Zero is a score like any other; an epoch without one, or with one that is not finite, is never among
    the best; of equal ones the earlier is the better. Where no epoch has a score nobody knows which will be
    the best, and all stay.
    """
    if mode not in ("max", "min"):
        raise UsageError(f"keep_best: {mode!r} is no direction: give 'max' or 'min'")
    return _KeepBest(scores, mode, _positive(count, "keep_best"))


def keep_all() -> RetentionPolicy:
    """Keep every epoch of the current line; only passed abandoned ones go."""
    return _KeepAll()


def to_retire(
    view: LogView, policy: RetentionPolicy, in_flight: Collection[str] = (), inside: int | None = None
) -> tuple[Retirement, ...]:
    """What to retire now, oldest first. `in_flight` are tries that a save under way refers to.

    `inside`: how many positions stay of the running epoch, None all; damaged ones while no newer one can be
    resumed from.
    Damaged entries are not kept for their own sake, but they stay until a newer entry can be resumed
    from: their files are the evidence.
    """
    kept = policy.keep(whole_epochs(view)) | protected(view.state)
    running = [entry for entry in view.line() if not _over(entry, view)]
    places = [entry for entry in _resumable(tuple(running)) if not entry.position.boundary]
    if inside is not None and len(places) > inside:
        running = [entry for entry in running if entry.position >= places[-inside].position]
    kept |= {entry.key for entry in running}
    kept |= {entry.key for entry in view.abandoned() if not _passed(entry, view)}
    needed = _needed(view, {entry.try_name for entry in view.entries if entry.key in kept} | set(in_flight))
    return tuple(Retirement(entry.try_name) for entry in view.entries if entry.try_name not in needed)


def kept_with(view: LogView, try_name: str) -> frozenset[str]:
    """What stays as long as this try is needed: itself, the tries its entry refers to, and so on."""
    return frozenset(_needed(view, {try_name}))


def _needed(view: LogView, kept: set[str]) -> set[str]:
    """The kept tries, what their entries refer to, what those refer to, and so on."""
    entries = {entry.try_name: entry for entry in view.entries}
    needed, pending = set(kept), list(kept)
    while pending:
        entry = entries.get(pending.pop())
        further = set(entry.needs) - needed if entry else set()
        needed |= further
        pending.extend(further)
    return needed


def whole_epochs(view: LogView) -> tuple[Entry, ...]:
    """The entries at the ends of epochs that the current branch sees, oldest first."""
    return tuple(entry for entry in view.line() if entry.position.boundary)


def _over(entry: Entry, view: LogView) -> bool:
    """Whether a newer whole epoch of the line can be resumed from."""
    newest = view.newest(boundary=True)
    return newest is not None and newest.position > entry.position


def _passed(entry: Entry, view: LogView) -> bool:
    """Whether the current branch itself, beyond its base, has gone further than an abandoned entry."""
    own = [one.position for one in view.candidates() if one.branch == view.current.id]
    return bool(own) and own[0] > entry.position


def _resumable(line: tuple[Entry, ...]) -> list[Entry]:
    return [entry for entry in line if entry.healthy and entry.resumable]


def _positive(value: int, name: str) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name}({value!r}) keeps nothing: give a whole number from 1 on")
    return value
