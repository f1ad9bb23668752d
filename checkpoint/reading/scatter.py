"""Copies of boxes between a stored entry and a destination: which bytes to read, and where they go.

A box that is one run of bytes on both sides is read straight into its destination. Any other is read in
slabs, each the bytes from the slab's first to its last element, and put into place from there: those of a
file pass through memory in its order, so that it matters to nobody where blocks end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from torchrelay.checkpoint.format.mesh_geometry import Bounds, Interval, halves, runs, volume, whole
from torchrelay.checkpoint.format.utils import lazily
from torchrelay.records import dataclass

SLAB_BYTES = 2 << 20
"""A slab takes at most so much memory, or one element; larger ones leave the processor's cache."""


@dataclass(frozen=True)
class Copy:
    """The box `part` of a leaf, from an entry that holds `source`, into the box `place` of a tensor.

    The entry has the elements of `source` in row-major order from its element `first` on.
    """

    source: Bounds
    first: int
    part: Bounds
    place: Bounds
    shape: tuple[int, ...]

    @property
    def straight(self) -> tuple[Interval, int] | None:
        """The elements of the entry and where they begin in the destination, if both are one run."""
        stored = list(itertools.islice(runs(self.source, self.part), 2))
        placed = list(itertools.islice(runs(whole(self.shape), self.place), 2))
        if len(stored) != 1 or len(placed) != 1:
            return None
        (start, stop), (at, _) = stored[0], placed[0]
        return (self.first + start, self.first + stop), at

    def slabs(self, item_bytes: int) -> Iterator[Slab]:
        """Boxes of the part that can be read each with one range."""
        pending = [self.part]
        while pending:
            box = pending.pop()
            start, stop = _hull(self.source, box)
            if (stop - start) * item_bytes <= SLAB_BYTES or volume(box) == 1:
                yield Slab(self, box, (self.first + start, self.first + stop), item_bytes)
            else:
                pending += reversed(halves(box))


@dataclass(frozen=True)
class Slab:
    """A box of a copy, and the elements of the entry from its first to its last one, of `item_bytes` each."""

    copy: Copy
    box: Bounds
    elements: Interval
    item_bytes: int

    @lazily
    def span(self) -> tuple[int, int]:
        """Its bytes within the entry."""
        return self.elements[0] * self.item_bytes, self.elements[1] * self.item_bytes

    def put(self, data: memoryview, destination: memoryview) -> None:
        """Copy the box out of its bytes `data` into its place in the bytes of the destination."""
        import torch

        form = self._form
        source = torch.frombuffer(data, dtype=form.kind).as_strided(form.size, form.strides)
        target = torch.frombuffer(destination, dtype=form.kind).view(form.shape)
        target[form.place].copy_(source)

    @lazily
    def _form(self) -> _Form:
        """Worked out once: leaves of one form have the same slabs."""
        import torch

        words = next(size for size in (8, 4, 2, 1) if self.item_bytes % size == 0)
        kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[words]
        many = self.item_bytes // words
        extents = [stop - start for start, stop in self.copy.source]
        strides = [many * math.prod(extents[dim + 1 :]) for dim in range(len(extents))]
        size = [stop - start for start, stop in self.box]
        moved = zip(self.box, self.copy.part, self.copy.place, strict=True)
        place = tuple(slice(a - low + at, b - low + at) for (a, b), (low, _), (at, _) in moved)
        return _Form(kind, [*size, many], [*strides, 1], [*self.copy.shape, many], place)


@dataclass(frozen=True)
class _Form:
    """How torch sees a slab: `size` and `strides` of what was read, and its `place` in `shape`, in words."""

    kind: Any
    size: list[int]
    strides: list[int]
    shape: list[int]
    place: tuple[slice, ...]


def _hull(outer: Bounds, box: Bounds) -> Interval:
    """From the first to beyond the last element of a box within the elements of `outer`."""
    start = stop = 0
    for (low, high), (a, b) in zip(outer, box, strict=True):
        start = start * (high - low) + a - low
        stop = stop * (high - low) + b - 1 - low
    return start, stop + 1
