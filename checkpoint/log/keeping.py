"""Which epochs and which of their files a run keeps: what users say of retention, in one value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.changes import protected
from torchrelay.checkpoint.log.live import DAMAGED, Entry, Key, Retirement
from torchrelay.checkpoint.log.log_writer import LogWriter
from torchrelay.checkpoint.log.retention import RetentionPolicy, keep_all, keep_every, to_retire
from torchrelay.errors import UsageError

OPTIMIZER = "optim"


@dataclass(frozen=True)
class Keeping:
    """`last` newest epochs and every `every`-th one are kept; None of both keeps all.

    Of the epochs that are kept only the newest `optimizer_last` keep their optimizer's files: an older
    one cannot be resumed from any more, everything else of it is loadable as before. Marked epochs keep
    all. Raises UsageError for anything but whole numbers from 1.
    """

    last: int | None = None
    every: int | None = None
    optimizer_last: int | None = None

    def __post_init__(self) -> None:
        for name, count in (
            ("keep_last", self.last),
            ("keep_every", self.every),
            ("keep_optimizer_last", self.optimizer_last),
        ):
            if count is not None and (type(count) is not int or count < 1):
                raise UsageError(f"{name} is {count!r}; it is a whole number from 1 (None keeps all epochs)")

    @property
    def everything(self) -> bool:
        """Whether nothing is ever given up."""
        return self.last is None and self.every is None and self.optimizer_last is None

    @property
    def policy(self) -> RetentionPolicy:
        """What is kept of the line, whole or without its optimizer."""
        if self.last is None:
            return keep_all() if self.every is None else keep_every(self.every)
        newest: RetentionPolicy = _NewestHealthy(self.last)
        return newest if self.every is None else newest | keep_every(self.every)

    @property
    def rule(self) -> str:
        """What was asked for, as it stands in the records."""
        counts = (("keep_last", self.last), ("keep_every", self.every))
        asked = [f"{name}={count}" for name, count in counts if count is not None]
        return ", ".join(asked) or "what a rewind abandoned goes once it is passed"

    def chosen(self, view: LogView, suspects: Collection[Key] = ()) -> tuple[Retirement, ...]:
        """What goes whole. `suspects` are entries that are not proved: none of them is a reason to let go."""
        return to_retire(_suspecting(view, suspects), self.policy)

    def chosen_optimizers(self, view: LogView, suspects: Collection[Key] = ()) -> tuple[Retirement, ...]:
        """What loses its optimizer."""
        if self.optimizer_last is None:
            return ()
        return optimizers_to_retire(_suspecting(view, suspects), self.optimizer_last)

    def retire(self, writer: LogWriter, suspects: Collection[Key] = ()) -> None:
        """Say durably, in the log, what is given up; deletes nothing. Raises FencedError and StorageError."""
        if self.optimizer_last is not None:
            rule = f"keep_optimizer_last={self.optimizer_last}"
            writer.retire(lambda view: self.chosen_optimizers(view, suspects), rule)
        writer.retire(lambda view: self.chosen(view, suspects), self.rule)


def _suspecting(view: LogView, suspects: Collection[Key]) -> LogView:
    """The view in which suspects count as the damaged ones that they may be."""
    if not suspects:
        return view
    entries = tuple(
        replace(one, health=DAMAGED) if one.key in suspects and one.healthy else one for one in view.entries
    )
    return replace(view, state=replace(view.state, entries=entries))


@dataclass(frozen=True)
class _NewestHealthy(RetentionPolicy):
    """The newest epochs that are not damaged, those included that lost their optimizer on purpose."""

    count: int

    def keep(self, line: tuple[Entry, ...]) -> frozenset[Key]:
        return frozenset(entry.key for entry in [one for one in line if one.healthy][-self.count :])


def optimizers_to_retire(view: LogView, count: int) -> tuple[Retirement, ...]:
    """The optimizer groups of whole epochs older than the newest `count` that can be resumed from.

    Left alone are marked and damaged epochs, epochs whose files another one needs, epochs that have no
    other files, and those of abandoned branches.
    """
    line = [entry for entry in view.line() if entry.position.boundary]
    resumable = [entry for entry in line if entry.healthy and entry.resumable]
    spared = protected(view.state) | {entry.key for entry in resumable[-count:]}
    needed = {name for entry in view.entries for name in entry.needs}
    return tuple(
        Retirement(entry.try_name, (OPTIMIZER,))
        for entry in resumable
        if entry.key not in spared
        and entry.try_name not in needed
        and OPTIMIZER in entry.groups
        and len(entry.groups) > 1
    )
