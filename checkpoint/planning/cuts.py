"""Where to cut a byte string of leaves between its writers: pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchrelay.checkpoint.disk.layouts import Cut
from torchrelay.checkpoint.disk.manifest import table

CUT_BYTES = 1 << 20
"""Leaves are cut at multiples of this from their start: digest blocks then fall on the same bytes
however many nodes write, so a leaf's digest does not depend on the cut."""


def cuts_between(sizes: Sequence[int], item_bytes: Sequence[int], shares: int, cut: int) -> tuple[Cut, ...]:
    """Cut leaves of `sizes` bytes into `shares` runs; `shares` + 1 cuts from the start to the end.

    Every cut is the candidate nearest to its ideal (total * i / shares): multiples of `cut` bytes
    inside leaves of at least `cut` bytes, and the ends of leaves. Each share therefore differs from
    the ideal share by at most the larger of `cut` and the largest leaf that is not cut.
    """
    string = _String(tuple(sizes), tuple(item_bytes), (0, *accumulate(sizes)), shares, cut)
    inner = map(string.nearest, range(1, shares))
    return table(Cut, [(0, 0), *inner, (len(sizes), 0)])


@dataclass(frozen=True)
class _String:
    """Bytes times `shares` are whole numbers, so every rank computes the same cuts."""

    sizes: tuple[int, ...]
    item_bytes: tuple[int, ...]
    ends: tuple[int, ...]
    shares: int
    cut: int

    def nearest(self, number: int) -> tuple[int, int]:
        """The candidate nearest to the ideal cut of this number; of two equally near the lower."""
        scaled = self.ends[-1] * number
        item = bisect_right(self.ends, scaled // self.shares) - 1
        if item == len(self.sizes):
            return self._before(item)
        size, width = self.sizes[item], self.item_bytes[item]
        inside = scaled - self.ends[item] * self.shares
        step = self.cut if size >= self.cut and self.cut % width == 0 else size
        below = inside // (step * self.shares) * step
        above = min(below + step, size)
        nearest = below if inside - below * self.shares <= above * self.shares - inside else above
        if nearest == size:
            return self._before(item + 1)
        return self._before(item) if nearest == 0 else (item, nearest // width)

    def _before(self, item: int) -> tuple[int, int]:
        """Before an item, and before the empty ones that precede it: a byte has one cut."""
        while item > 0 and self.ends[item - 1] == self.ends[item]:
            item -= 1
        return (item, 0)
