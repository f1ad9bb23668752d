"""A long text, looked at some thousands of characters at a time: what is made of them stays in the cache.

Ten megabytes at once cost more for the memory that they come to lie in than for anything done with them.
"""

from __future__ import annotations

from collections.abc import Iterator

WINDOW = 1 << 16
"""Bytes of a window at most, unless there is no separator in as many."""


def windows(data: bytes, part: range, separator: bytes) -> Iterator[str]:
    """A part of the data in windows, cut where there is a separator, which is in none of both.

    Raises ValueError for what is no UTF-8.
    """
    at, view = part.start, memoryview(data)
    while True:
        end = data.rfind(separator, at, at + WINDOW) if at + WINDOW < part.stop else part.stop
        if end < 0:
            end = data.find(separator, at, part.stop)
        end = part.stop if end < 0 else end
        yield str(view[at:end], "utf-8")
        if end == part.stop:
            return
        at = end + len(separator)
