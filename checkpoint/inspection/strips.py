"""Which stored elements of two epochs are the same elements of a leaf, and which bytes digests call equal.

Pure. Both epochs may have stored the leaf in other parts: cut at other places, in other boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE
from torchrelay.checkpoint.format.mesh_geometry import Bounds, intersect
from torchrelay.checkpoint.inspection.tensor_bytes import Part
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Suspect:
    """Elements of a strip that digests do not call equal; `differs` where they say so of each block."""

    start: int
    stop: int
    differs: bool


@dataclass(frozen=True)
class Strip:
    """Elements from `a_at` on of part `a` are those from `b_at` on of part `b`; `count` of them."""

    a: Part
    b: Part
    a_at: int
    b_at: int
    count: int

    def unequal(self) -> list[Suspect]:
        """The elements of the strip, from its start, of which the digests do not say that they are equal.

        Digests tell of blocks that lie in both parts at the same place of the strip, whole.
        """
        width = self.a.item_bytes
        start, shift = self.a_at * width, (self.b_at - self.a_at) * width
        stop = start + self.count * width
        if shift % BLOCK:
            return [Suspect(0, self.count, differs=False)] if self.count else []
        found: list[Suspect] = []
        for first in range(start // BLOCK * BLOCK, stop, BLOCK):
            equal = self._equal(first, shift, start, stop)
            if equal is not True:
                low, high = max(first, start), min(first + BLOCK, stop)
                suspect = Suspect((low - start) // width, (high - start) // width, differs=equal is False)
                _append(found, suspect)
        return found

    @property
    def everything(self) -> list[Suspect]:
        """All elements of the strip."""
        return [Suspect(0, self.count, differs=False)] if self.count else []

    def _equal(self, first: int, shift: int, start: int, stop: int) -> bool | None:
        """Whether the block at byte `first` of part a and the one there in b are the same; None: unknown."""
        end = min(first + BLOCK, self.a.nbytes)
        other = first + shift
        if first < start or end > stop or other < 0 or min(other + BLOCK, self.b.nbytes) != end + shift:
            return None
        a, b = first // BLOCK * SIZE, other // BLOCK * SIZE
        return self.a.digests[a : a + SIZE] == self.b.digests[b : b + SIZE]


@dataclass(frozen=True)
class Region:
    """A box of the leaf that is stored in other orders in two parts.

    `a_source` and `b_source` are the boxes that hold it, which begin at these elements of their parts.
    """

    a: Part
    b: Part
    a_source: Bounds
    b_source: Bounds
    a_first: int
    b_first: int
    box: Bounds


def _append(found: list[Suspect], one: Suspect) -> None:
    last = found[-1] if found else None
    if last is not None and last.stop == one.start and last.differs == one.differs:
        found[-1] = Suspect(last.start, one.stop, differs=last.differs)
    else:
        found.append(one)


def matched(a: Sequence[Part], b: Sequence[Part]) -> Iterator[Strip | Region]:
    """All elements of a leaf, each once, as they lie in the parts of one epoch and of the other."""
    boxes = {part.box: part for part in b if part.box is not None}
    same = [(part, boxes[part.box]) for part in a if part.box is not None and part.box in boxes]
    for one, other in same:
        yield Strip(one, other, 0, 0, one.elements)
    done = {part.box for part, _ in same}
    a = [part for part in a if part.box is None or part.box not in done]
    b = [part for part in b if part.box is None or part.box not in done]
    if all(part.run is not None for part in (*a, *b)):
        yield from _along(a, b)
    else:
        yield from _across(a, b)


def _along(a: Sequence[Part], b: Sequence[Part]) -> Iterator[Strip]:
    """Runs of elements on both sides: from one cut to the next."""
    left = sorted(((part.run, part) for part in a if part.run), key=lambda pair: pair[0])
    right = sorted(((part.run, part) for part in b if part.run), key=lambda pair: pair[0])
    i = j = 0
    while i < len(left) and j < len(right):
        (first, last), one = left[i]
        (begin, end), other = right[j]
        low, high = max(first, begin), min(last, end)
        if low < high:
            yield Strip(one, other, low - first, low - begin, high - low)
        i, j = i + (last <= end), j + (end <= last)


def _across(a: Sequence[Part], b: Sequence[Part]) -> Iterator[Region]:
    """Boxes of the one cut with boxes of the other."""
    for one in a:
        for a_source, a_first in one.boxes:
            for other in b:
                for b_source, b_first in other.boxes:
                    box = intersect(a_source, b_source)
                    if box is not None:
                        yield Region(one, other, a_source, b_source, a_first, b_first, box)
