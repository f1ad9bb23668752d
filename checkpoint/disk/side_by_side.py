"""A list of independent reads, done by some threads where there is enough to do.

Some wait for the device or copy from the kernel while another verifies; measured in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from torchrelay.checkpoint.storage.threads import share

T = TypeVar("T")
EACH = 4 << 20
"""Bytes of work for each thread: with less, one costs more to start than it saves."""


def each(work: Callable[[T], None], items: Iterable[T], nbytes: int, threads: int) -> None:
    """Call `work` with every item, begun in their order; the first error ends it and is raised.

    No thread is at work any more when this returns or raises: destinations are the caller's again.
    """

    def run(mine: Iterator[T]) -> None:
        for item in mine:
            work(item)

    most = min(threads, len(items)) if isinstance(items, Sized) else threads
    share(run, items, min(most, max(1, nbytes // EACH)), name="torchrelay-read")
