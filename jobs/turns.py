"""Python's interpreter runs one thread at a time: at a boundary it is the turn of the training's thread.

A thread that computes in Python keeps it for 5 ms before another gets it, and gets its share of all that
follows. What goes on behind the training (writing a save, deleting old epochs) has time, so it begins
when the boundary is over. Nothing is interrupted that goes on already.
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
def undivided() -> Iterator[None]:
    """Inside, threads behind the training begin nothing new, for so long at most."""
    _begin.clear()
    try:
        yield
    finally:
        _begin.set()


def begin_now() -> None:
    """Called by whoever is going to wait for a thread behind the training: it may begin."""
    _begin.set()


def behind() -> None:
    """Called by a thread behind the training: returns when it may begin."""
    _begin.wait(MOST_SECS)
