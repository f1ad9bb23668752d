"""How far the long works of this process are: saves, loads and proofs, for whoever shows it.

Works say what they do and how many bytes they are going to move; the storages' calls say what was moved
(`underway`). Nobody waits here, and nothing is decided by it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.checkpoint.underway import moved_bytes
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Work:
    """One work: `nbytes` in all (None: not known), of which `done` are moved, in `secs` until now."""

    what: str
    nbytes: int | None
    done: int
    secs: float

    @property
    def secs_left(self) -> float | None:
        """At the rate until now; None while nothing tells."""
        if not self.nbytes or not self.done or self.secs <= 0:
            return None
        return max(self.nbytes - self.done, 0) * self.secs / self.done


_numbers = itertools.count()
_now: dict[int, tuple[str, int | None, int, float]] = {}


@contextmanager
def headway(what: str, nbytes: int | None = None) -> Iterator[None]:
    """Say that the block is such a work."""
    number = next(_numbers)
    _now[number] = (what, nbytes, moved_bytes(), time.monotonic())
    try:
        yield
    finally:
        del _now[number]


def works() -> list[Work]:
    """The works that are going on, the oldest first. What two at once move is counted for both."""
    moved, now = moved_bytes(), time.monotonic()
    found = []
    for what, nbytes, before, since in list(_now.values()):
        done = moved - before
        found.append(Work(what, nbytes, done if nbytes is None else min(done, nbytes), now - since))
    return found
