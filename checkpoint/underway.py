"""The calls into storages that are going on now, so that one that hangs is told from one that is slow.

A thread inside a call that never returns cannot tell. Each call is noted where it begins and forgotten where
it ends; who watches the process asks for those that take longer than any storage that still moves.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE_SECS = 60.0
"""How long a call may take that moves no bytes to speak of."""
LEAST_RATE = 16 << 20
"""Bytes per second by which a call that moves many may take longer: a storage that is slower hangs."""
_PATIENT_VERBS = {"delete": 300.0}  # a large file's blocks are freed within the call


@dataclass(frozen=True)
class Call:
    """One call: what it does to which path, how many bytes it moves, and since when (monotonic clock)."""

    verb: str
    path: str
    nbytes: int
    since: float

    def hangs(self, now: float) -> bool:
        """Whether it takes longer than it may."""
        allowed = _PATIENT_VERBS.get(self.verb, PATIENCE_SECS) + self.nbytes / LEAST_RATE
        return now - self.since > allowed


_MOVING_VERBS = {"read", "write"}

_numbers = itertools.count()
_now: dict[int, Call] = {}
_moved: dict[int, int] = {}
"""By thread, so that no count is lost."""


@contextmanager
def underway(verb: str, path: object, nbytes: int = 0) -> Iterator[None]:
    """Note a call for as long as the block takes."""
    number = next(_numbers)
    _now[number] = Call(verb, str(path), nbytes, time.monotonic())
    try:
        yield
        if verb in _MOVING_VERBS:
            moved(nbytes)
    finally:
        del _now[number]


def moved(nbytes: int) -> None:
    """Count bytes that this thread has read or written in a storage."""
    if nbytes:
        thread = threading.get_ident()
        _moved[thread] = _moved.get(thread, 0) + nbytes


def moved_bytes() -> int:
    """What all threads of this process have moved in storages since it began."""
    return sum(list(_moved.values()))


def calls() -> list[Call]:
    """The calls of this process that are going on, the oldest first."""
    return list(_now.values())


def hanging() -> str | None:
    """Say which call hangs, for how long; None when none does."""
    now = time.monotonic()
    for call in calls():
        if call.hangs(now):
            return (
                f"cannot {call.verb} {call.path}: the storage has not answered for {now - call.since:.0f} s"
            )
    return None
