"""The first bad one of a row in which everything after a bad one is bad. Pure."""

from __future__ import annotations

from collections.abc import Callable


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int | None:
    """The lowest number below `count` that is bad, None if the last is not.

    Asks at most ceil(log2(count)) + 1 times, each number once: the last, then halves. The neighbour below the
    answer was always asked, and was good. Where a good one follows a bad one, an answer is still a bad one
    behind a good one, but perhaps not the first; where the last is good, it is None.
    """
    if count < 1 or not is_bad(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(middle):
            high = middle
        else:
            low = middle + 1
    return high
