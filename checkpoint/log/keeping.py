"""Which epochs and which of their files a run keeps: what users say of retention, in one value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from functools import reduce
from operator import or_
from typing import Any

from torchrelay.checkpoint.format.log_state import DAMAGED, Entry, Key, Retirement, State
from torchrelay.checkpoint.log import changes
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.changes import protected
from torchrelay.checkpoint.log.log_writer import LogWriter
from torchrelay.checkpoint.log.retention import (
    RetentionPolicy,
    Scores,
    every_n_epochs,
    keep_all,
    keep_best,
    to_retire,
    whole_epochs,
)
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

OPTIMIZER = "optim"
BestEpochs = tuple[str, str] | tuple[str, str, int] | None
"""How users write `Best`: `("val/acc", "max")`, or `("val/acc", "max", 3)` for the best three."""


@dataclass(frozen=True)
class Best:
    """The `count` best epochs by a metric, where `mode` is "max" or "min"."""

    metric: str
    mode: str
    count: int = 1

    @classmethod
    def of(cls, given: Any) -> Best | None:
        """What users write, see `BestEpochs`; UsageError for anything else."""
        if given is None:
            return None
        if isinstance(given, tuple) and len(given) in (2, 3):
            metric, mode, count = (*given, 1)[:3]
            good = isinstance(metric, str) and metric and mode in ("max", "min")
            if good and type(count) is int and count >= 1:
                return cls(metric, mode, count)
        raise UsageError(
            f"keep_best is {given!r:.80}; it is a metric and a direction, and perhaps how many epochs, "
            "for example ('val/acc', 'max') or ('val/acc', 'max', 3)"
        )

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}" + (f":{self.count}" if self.count > 1 else "")


@dataclass(frozen=True)
class Keeping:
    """What is kept: an epoch stays if any of these wants it; None of all keeps all.

    `last` newest epochs, every `every`-th one, and those that are `best` by a metric, of the current branch.
    The metrics stand in the epochs: without `scores` of them `best` keeps all.

    `without` names epochs of the current line that go, and nothing else goes then.

    Of the epochs that are kept only the newest `optimizer_last` keep their optimizer's files: an older
    one cannot be resumed from any more, everything else of it is loadable as before. Marked epochs keep
    all. Raises UsageError for anything but whole numbers from 1.
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
                raise UsageError(f"{name} is {count!r}; it is a whole number from 1 (None keeps all epochs)")

    @property
    def everything(self) -> bool:
        """Whether nothing is ever given up."""
        return self == KEEP_ALL

    @property
    def policy(self) -> RetentionPolicy:
        """What is kept of the line, whole or without its optimizer."""
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
        """What was asked for, as it stands in the records."""
        asked_for = (("keep_last", self.last), ("keep_every", self.every), ("keep_best", self.best))
        asked = [f"{name}={value}" for name, value in asked_for if value is not None]
        if self.without:
            return f"epoch {', '.join(map(str, self.without))} was named"
        return ", ".join(asked) or "what a rewind abandoned goes once it is passed"

    def chosen(
        self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()
    ) -> tuple[Retirement, ...]:
        """What goes whole. `suspects` are entries that are not proved: none of them is a reason to let go.

        `needed` are tries that stay, whatever the rules.
        """
        if not self.without:
            return to_retire(_suspecting(view, suspects), self.policy, needed, self.last)
        named = [entry for entry in whole_epochs(view) if entry.position.epoch in self.without]
        return tuple(Retirement(entry.try_name) for entry in named if entry.try_name not in needed)

    def chosen_optimizers(
        self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()
    ) -> tuple[Retirement, ...]:
        """What loses its optimizer."""
        if self.optimizer_last is None:
            return ()
        found = optimizers_to_retire(_suspecting(view, suspects), self.optimizer_last)
        return tuple(one for one in found if one.try_name not in needed)

    def after(self, view: LogView, suspects: Collection[Key] = (), needed: Collection[str] = ()) -> State:
        """What `retire` would leave of a log; changes nothing."""
        state, _ = changes.retired(view.state, self.chosen(view, suspects, needed))
        thinner = self.chosen_optimizers(replace(view, state=state), suspects, needed)
        return changes.retired(state, thinner)[0]

    def retire(self, writer: LogWriter, suspects: Collection[Key] = (), needed: Collection[str] = ()) -> None:
        """Say durably, in the log, what is given up; deletes nothing. Raises FencedError and StorageError."""
        writer.retire(lambda view: self.chosen(view, suspects, needed), self.rule)
        if self.optimizer_last is not None:
            rule = f"keep_optimizer_last={self.optimizer_last}"
            writer.retire(lambda view: self.chosen_optimizers(view, suspects, needed), rule)


KEEP_ALL = Keeping()


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
    resumable = [entry for entry in whole_epochs(view) if entry.healthy and entry.resumable]
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
