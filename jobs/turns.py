"""Python's interpreter runs one thread at a time: at a boundary it is the turn of the training's thread.

A thread that computes in Python keeps it for 5 ms before another gets it, and gets its share of all that
follows. What goes on behind the training (writing a save, deleting old epochs) has time, so it begins
when the next epoch's tasks do. Nothing is interrupted that goes on already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SECS = 0.1
"""How long a thread behind the training is kept from beginning, whatever happens."""

_may_begin = threading.Event()
_may_begin.set()


class _Turn:
    """Whose turn it is: the training's thread alone, unless somebody waits for another."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._undivided = False
        self._waiting = 0

    def set(self, undivided: bool) -> None:
        with self._changing:
            self._undivided = undivided
            self._tell()

    def count(self, waiting: int) -> None:
        with self._changing:
            self._waiting += waiting
            self._tell()

    def _tell(self) -> None:
        if self._undivided and not self._waiting:
            _may_begin.clear()
        else:
            _may_begin.set()


_turn = _Turn()


@contextmanager
def undivided(*, beyond: bool = False) -> Iterator[None]:
    """Inside, threads behind the training begin nothing new, for so long at most.

    With `beyond` what follows is undivided, too, until `begin_now` is called; not after an error.
    """
    _turn.set(undivided=True)
    try:
        yield
    except BaseException:
        _turn.set(undivided=False)
        raise
    if not beyond:
        _turn.set(undivided=False)


def begin_now() -> None:
    """Threads behind the training may begin. Called where a task of the program begins."""
    _turn.set(undivided=False)


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, threads behind the training may begin: for whoever waits for one."""
    _turn.count(+1)
    try:
        yield
    finally:
        _turn.count(-1)


def behind() -> None:
    """Called by a thread behind the training: returns when it may begin."""
    _may_begin.wait(MOST_SECS)
