"""The first bad epoch of a row, and the first jump of a metric over epochs. Pure.

A change from one epoch to the next is a jump if it is further than `factor` spreads from the median of
the changes before it (at most `WINDOW` of them, at least `LEAST`). The spread is their median absolute
deviation, scaled to a standard deviation, but no less than a hundredth of the level (the median size of
the values in the window): a curve that is smooth to the last digit does not make a jump of a wiggle.
NaN and Inf are jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from torchrelay.records import dataclass


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


WINDOW = 16
LEAST = 4
FACTOR = 8.0
_TO_STANDARD_DEVIATION = 1.4826
_LEVEL = 0.01


@dataclass(frozen=True)
class Jump:
    """Value number `at` is a jump; the change from the one before, the usual change, and the spread.

    The three are None where the value is NaN or Inf.
    """

    at: int
    change: float | None = None
    usual: float | None = None
    spread: float | None = None


def first_jump(values: Sequence[float], factor: float = FACTOR) -> Jump | None:
    """The first jump of a row of values; None without one.

    The first `LEAST` changes are never a jump unless they lead to NaN or Inf: nothing says what is usual.
    """
    for at, value in enumerate(values):
        if not math.isfinite(value):
            return Jump(at)
        if at > LEAST:
            change = value - values[at - 1]
            usual, spread = _usual(values[max(0, at - 1 - WINDOW) : at])
            if abs(change - usual) > factor * spread:
                return Jump(at, change, usual, spread)
    return None


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """The median change and the spread of changes of a row."""
    changes = [after - before for before, after in pairwise(values)]
    usual = median(changes)
    deviation = median(abs(change - usual) for change in changes)
    level = median(abs(value) for value in values)
    return usual, max(_TO_STANDARD_DEVIATION * deviation, _LEVEL * level)
