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

_begin = threading.Event()
_begin.set()


@contextmanager
def undivided(*, beyond: bool = False) -> Iterator[None]:
    """Inside, threads behind the training begin nothing new, for so long at most.

    With `beyond` what follows is undivided, too, until `begin_now` is called; not after an error.
    """
    _begin.clear()
    try:
        yield
    except BaseException:
        _begin.set()
        raise
    if not beyond:
        _begin.set()


def begin_now() -> None:
    """Threads behind the training may begin.

    Called where a task of the program begins, and by whoever is going to wait for such a thread.
    """
    _begin.set()


def behind() -> None:
    """Called by a thread behind the training: returns when it may begin."""
    _begin.wait(MOST_SECS)
