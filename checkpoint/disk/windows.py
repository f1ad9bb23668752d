"""Windows: where boxes of a leaf belong in a tensor that holds only a part of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torchrelay.checkpoint.disk.boxes import Bounds, Interval, whole
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Window:
    """The box `box` of a leaf belongs to the box `place`, of the same extents, of a destination."""

    box: Bounds
    place: Bounds


@dataclass(frozen=True)
class Target:
    """A destination of `shape` and what of a leaf belongs into it; the windows' places cover it exactly."""

    shape: tuple[int, ...]
    windows: tuple[Window, ...]


def whole_target(shape: Sequence[int]) -> Target:
    """A destination for all of a leaf."""
    everything = whole(shape)
    return Target(tuple(shape), (Window(everything, everything),))


def local_target(intervals: Sequence[Sequence[Interval]]) -> Target:
    """A local tensor that has these indices of each dimension, in this order."""
    placed = [_placed(one) for one in intervals]
    windows = tuple(
        Window(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        for pairs in itertools.product(*placed)
    )
    return Target(tuple(sum(b - a for a, b in one) for one in intervals), windows)


def place_of(intervals: Sequence[Sequence[Interval]], box: Bounds) -> Bounds:
    """Where a box, each side of it within one of the intervals, lies in a `local_target`."""
    return tuple(
        next((a - low + at, b - low + at) for (low, high), (at, _) in _placed(one) if low <= a and b <= high)
        for one, (a, b) in zip(intervals, box, strict=True)
    )


def _placed(intervals: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """Each interval with its place in the concatenation of all."""
    found, at = [], 0
    for start, stop in intervals:
        found.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return found
