"""The garbage collector, held back for the moment in which thousands of small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make no search for cycles within the block, which makes none: every search would look at all of torch.

    For milliseconds only, because it counts for all threads. Blocks of several threads may overlap.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
