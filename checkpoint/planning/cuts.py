"""Where to cut a byte string of leaves between its writers: pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torchrelay.checkpoint.format.layouts import Cut
from torchrelay.checkpoint.format.manifest.schema import table

CUT_BYTES = 1 << 20
"""Leaves are cut at multiples of this from their start: digest blocks then fall on the same bytes
however many nodes write, so a leaf's digest does not depend on the cut."""


def cuts_between(sizes: Sequence[int], item_bytes: Sequence[int], shares: int, cut: int) -> tuple[Cut, ...]:
    """Cut leaves of `sizes` bytes into `shares` runs; `shares` + 1 cuts from the start to the end.

    Every cut is the candidate nearest to its ideal (total * i / shares): multiples of `cut` bytes
    inside leaves of at least `cut` bytes, and the ends of leaves. Each share therefore differs from
    the ideal share by at most the larger of `cut` and the largest leaf that is not cut.
    """
    ends = (0, *accumulate(sizes))
    total, number, found = ends[-1], 1, [(0, 0)]
    while total and number < shares:
        item = bisect_right(ends, total * number // shares) - 1
        before, size, width = ends[item], sizes[item], item_bytes[item]
        behind = -(-ends[item + 1] * shares // total)  # the first ideal cut that is not in this item
        ideals = range(number * total - before * shares, behind * total - before * shares, total)
        step = cut if size >= cut and cut % width == 0 else size
        # A byte has one cut: before the empty items that precede the item that it is in.
        edges = {0: (bisect_left(ends, before), 0), size: (item + 1, 0)}
        nearest = _nearest(ideals, size, step, shares)
        found += [edges[at] if at in edges else (item, at // width) for at in nearest]
        number = behind
    inner = found if total else found * shares
    return table(Cut, [*inner, (len(sizes), 0)])


def _nearest(ideals: range, size: int, step: int, shares: int) -> list[int]:
    """The multiples of `step` bytes, or the end of an item, nearest to ideals; of two equally near the lower.

    Ideals are bytes times `shares`, which are whole numbers: every rank computes the same.
    """
    twice, last = 2 * step * shares, size // step * step
    middle = (last + size) * shares  # twice the ideal that is as near to the end as to the last multiple
    return [
        step * ((2 * ideal + twice // 2 - 1) // twice)
        if ideal < last * shares
        else (last if 2 * ideal <= middle else size)
        for ideal in ideals
    ]
