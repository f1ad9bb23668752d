"""Positions: where in a run a checkpoint was taken."""

from __future__ import annotations

import re

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

_TEXT = re.compile(r"(0|[1-9][0-9]{0,7})(?:\+([1-9][0-9]{0,8}))?")
MAX_EPOCH = 10**8 - 1
"""Eight decimal digits: what a try directory's name has room for."""


@dataclass(frozen=True, order=True)
class Position:
    """(epoch, step): epoch 0 is the state after init, k after k epochs.

    (3, 1200), written `3+1200`, is 1,200 steps into the fourth epoch; only automatic resume uses
    positions with a step.
    """

    epoch: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}+{self.step}" if self.step else str(self.epoch)

    @property
    def boundary(self) -> bool:
        """Whether this is the end of a whole epoch."""
        return self.step == 0

    def directory(self, nonce: str) -> str:
        """The try directory's name below `data/`: e00000004-7f3a9c or e00000003s001200-7f3a9c."""
        step = f"s{self.step:06d}" if self.step else ""
        return f"e{self.epoch:08d}{step}-{nonce}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read `7` or `3+1200`; raises UsageError for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a position: write an epoch such as 7, or 3+1200 with a step")
        return cls(int(match[1]), int(match[2] or 0))
