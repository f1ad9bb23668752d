"""Calls into storages that are in flight, and the progress of long works: saves, loads, uploads.

A thread inside a call that never returns cannot tell. Each call is noted where it begins and forgotten where
it ends; who watches the process asks for those that take longer than any storage that still moves.

Works say what they do and how many bytes they are going to move; the storages' calls say what was moved
(`underway`). Nobody waits here, and nothing is decided by it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from torchrelay.records import dataclass

PATIENCE_SECS = 60.0
"""How long a call may take that moves no bytes to speak of."""
LEAST_RATE = 16 << 20
"""Bytes per second by which a call that moves many may take longer: a storage that is slower hangs."""
_PATIENT_VERBS = {"delete": 300.0}  # a large file's blocks are freed within the call


class Call(NamedTuple):
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

_calls: dict[int, tuple[str, str, int, float]] = {}
"""What a `Call` has, by the object that notes it: made quickly, for storages are called very often."""
_moved: dict[int, int] = {}
"""By thread, so that no count is lost."""


class underway:  # noqa: N801 - it reads as the statement that it is; a generator would take twice the time
    """Note a call for as long as the block takes; what is written or read then counts as moved."""

    __slots__ = ("_nbytes", "_path", "_verb")

    def __init__(self, verb: str, path: object, nbytes: int = 0) -> None:
        self._verb = verb
        self._path = str(path)
        self._nbytes = nbytes

    def __enter__(self) -> None:
        _calls[id(self)] = self._verb, self._path, self._nbytes, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _calls.pop(id(self), None)
        if error is not None:
            self._failed(error)
        elif self._verb in _MOVING_VERBS:
            moved(self._nbytes)

    def _failed(self, error: BaseException) -> None:
        """Say more of an error that ends the call."""

    def __del__(self) -> None:
        # Ctrl-C may come where the block begins or ends: what is not forgotten seems to hang for ever.
        _calls.pop(id(self), None)


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
    return [Call(*one) for one in list(_calls.values())]


def hanging() -> str | None:
    """Say which call hangs, for how long; None when none does."""
    now = time.monotonic()
    for call in calls():
        if call.hangs(now):
            return (
                f"cannot {call.verb} {call.path}: the storage has not answered for {now - call.since:.0f} s"
            )
    return None


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
_works: dict[int, tuple[str, int | None, int, float]] = {}


@contextmanager
def headway(what: str, nbytes: int | None = None) -> Iterator[None]:
    """Say that the block is such a work."""
    number = next(_numbers)
    _works[number] = (what, nbytes, moved_bytes(), time.monotonic())
    try:
        yield
    finally:
        del _works[number]


def works() -> list[Work]:
    """The works that are going on, the oldest first. What two at once move is counted for both."""
    moved, now = moved_bytes(), time.monotonic()
    found = []
    for what, nbytes, before, since in list(_works.values()):
        done = moved - before
        found.append(Work(what, nbytes, done if nbytes is None else min(done, nbytes), now - since))
    return found
