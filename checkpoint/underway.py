"""The calls into storages that are going on now, so that one that hangs is told from one that is slow.

A thread inside a call that never returns cannot tell. Each call is noted where it begins and forgotten where
it ends; who watches the process asks for those that take longer than any storage that still moves.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import NamedTuple

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

_now: dict[int, tuple[str, str, int, float]] = {}
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
        _now[id(self)] = self._verb, self._path, self._nbytes, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _now.pop(id(self), None)
        if error is not None:
            self._failed(error)
        elif self._verb in _MOVING_VERBS:
            moved(self._nbytes)

    def _failed(self, error: BaseException) -> None:
        """Say more of an error that ends the call."""

    def __del__(self) -> None:
        # Ctrl-C may come where the block begins or ends: what is not forgotten seems to hang for ever.
        _now.pop(id(self), None)


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
    return [Call(*one) for one in list(_now.values())]


def hanging() -> str | None:
    """Say which call hangs, for how long; None when none does."""
    now = time.monotonic()
    for call in calls():
        if call.hangs(now):
            return (
                f"cannot {call.verb} {call.path}: the storage has not answered for {now - call.since:.0f} s"
            )
    return None
