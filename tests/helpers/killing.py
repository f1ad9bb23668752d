"""Kills by schedule: at which step of which epoch which rank ends itself, and proof that it did."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kill:
    """SIGKILL of `rank` at `step` of `epoch`, once."""

    epoch: int
    step: int
    rank: int

    @property
    def name(self) -> str:
        return f"epoch-{self.epoch}-step-{self.step}-rank-{self.rank}"


@dataclass(frozen=True)
class Killer:
    """Carries a schedule out; each kill leaves a file in `marks` just before it happens."""

    marks: Path
    schedule: tuple[Kill, ...] = ()

    def at(self, epoch: int, step: int, rank: int) -> None:
        """Die here if the schedule says so and this kill has not happened yet."""
        kill = Kill(epoch, step, rank)
        if kill not in self.schedule or kill.name in fired(self.marks):
            return
        self.marks.mkdir(parents=True, exist_ok=True)
        (self.marks / kill.name).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def fired(marks: Path) -> set[str]:
    """The names of the kills that happened."""
    return {mark.name for mark in marks.iterdir()} if marks.is_dir() else set()


def names(schedule: Sequence[Kill]) -> set[str]:
    """What `fired` gives once all of a schedule has happened."""
    return {kill.name for kill in schedule}
