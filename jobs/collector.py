"""Work that makes very many small objects, without Python looking through all of them again and again."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def undisturbed() -> Iterator[None]:
    """No automatic collection of reference cycles inside; afterwards as before.

    Saving or loading 50,000 tensors makes a million objects that all stay in use, which sets off full
    collections that find nothing and take half of the time. Calls may be nested, also in several threads:
    the last one to leave restores. It looks through the young objects alone: with those counted, the next
    new object would set off the full collection that the imports of the program owe, 50 ms and more.
    """
    global _inside, _was_on  # noqa: PLW0603  # one switch per process is what there is
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)  # a child that was forked inside begins anew
            if _inside == 0 and _was_on:
                _settle()
                gc.enable()


def _settle() -> None:
    """Collect what was made meanwhile, if it is enough to set off a collection; no older objects."""
    if gc.get_count()[0] > gc.get_threshold()[0] > 0:
        gc.collect(0)


def _begin_anew() -> None:
    """A forked child has none of the threads that would restore."""
    global _lock, _inside  # noqa: PLW0603  # one switch per process is what there is
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
