"""Read boxes of leaves into tensors that hold only a part of them, from parts stored in any division.

A box that is contiguous on both sides is read straight into its destination. Any other is read in slabs, from
its first to its last byte, and copied from there. Slabs of a file are read in file order, so that each block
is read once; each thread has its own memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Near, PartForm
from torchrelay.checkpoint.format.mesh_geometry import (
    Bounds,
    Interval,
    LocalTarget,
    halves,
    intersect,
    range_boxes,
    runs,
    uncovered,
    volume,
    whole,
)
from torchrelay.checkpoint.format.names import encode_name
from torchrelay.checkpoint.format.shard.entries import StoredEntry
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import Passing, Portion, ReadOptions, ReadRequest
from torchrelay.checkpoint.storage.base import ReadHandle
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

SLAB_BYTES = 2 << 20
"""Memory of a slab, at most, or one element; larger slabs exceed the processor's cache."""


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
        """The elements of the entry and their offset in the destination, if both are contiguous."""
        stored = list(itertools.islice(runs(self.source, self.part), 2))
        placed = list(itertools.islice(runs(whole(self.shape), self.place), 2))
        if len(stored) != 1 or len(placed) != 1:
            return None
        (start, stop), (at, _) = stored[0], placed[0]
        return (self.first + start, self.first + stop), at

    def slabs(self, item_bytes: int) -> Iterator[Slab]:
        """Boxes of the part that can be read with one range each."""
        pending = [self.part]
        while pending:
            box = pending.pop()
            start = last = 0  # the first and last element of the box within those of `source`
            for (low, high), (a, b) in zip(self.source, box, strict=True):
                start, last = start * (high - low) + a - low, last * (high - low) + b - 1 - low
            stop = last + 1
            if (stop - start) * item_bytes <= SLAB_BYTES or volume(box) == 1:
                yield Slab(self, box, (self.first + start, self.first + stop), item_bytes)
            else:
                pending += reversed(halves(box))


@dataclass(frozen=True)
class Slab:
    """A box of a copy, and its range of elements in the entry, of `item_bytes` each."""

    copy: Copy
    box: Bounds
    elements: Interval
    item_bytes: int

    @cached_property
    def span(self) -> tuple[int, int]:
        """Its byte range within the entry."""
        return self.elements[0] * self.item_bytes, self.elements[1] * self.item_bytes

    def put(self, data: memoryview, destination: memoryview) -> None:
        """Copy the box from its bytes `data` to its place in the destination."""
        import torch

        kind, size, strides, shape, place = self._form
        source = torch.frombuffer(data, dtype=kind).as_strided(size, strides)
        torch.frombuffer(destination, dtype=kind).view(shape)[place].copy_(source)

    @cached_property
    def _form(self) -> tuple[Any, list[int], list[int], list[int], tuple[slice, ...]]:
        """In words: type, size and strides of the bytes, and place in a shape. Equal leaves share it."""
        import torch

        words = next(size for size in (8, 4, 2, 1) if self.item_bytes % size == 0)
        kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[words]
        many = self.item_bytes // words
        extents = [stop - start for start, stop in self.copy.source]
        strides = [many * math.prod(extents[dim + 1 :]) for dim in range(len(extents))]
        size = [stop - start for start, stop in self.box]
        moved = zip(self.box, self.copy.part, self.copy.place, strict=True)
        place = tuple(slice(a - low + at, b - low + at) for (a, b), (low, _), (at, _) in moved)
        return kind, [*size, many], [*strides, 1], [*self.copy.shape, many], place


PASSING_BYTES = 8 << 20
"""Slabs of a large entry per portion; a block at their borders is read twice."""
TOGETHER_BYTES = 4 << 20
"""Slabs of small entries per portion; entries and slabs are all in memory."""

Open = Callable[[LeafRow, int, str], ShardHeader]
"""Returns the header of the file of a node that holds a leaf's key."""


@dataclass(frozen=True)
class BoxRead:
    """A leaf, its stored parts, and the place of its boxes in the memory of a tensor."""

    leaf: LeafRow
    parts: Near
    target: LocalTarget
    destination: memoryview


@dataclass(frozen=True)
class _Placed:
    header: ShardHeader
    key: str
    entry: StoredEntry
    slab: Slab
    destination: memoryview

    @property
    def start(self) -> int:
        return self.entry.start + self.span[0]

    @property
    def span(self) -> tuple[int, int]:
        return self.slab.span

    @property
    def is_large(self) -> bool:
        """Whether its entry is larger than a block, so that a slab may need a part only."""
        return self.entry.nbytes > BLOCK


class BoxPlan:
    """Plan of the reads for some boxes; `straight` reads go to their destinations directly, by file."""

    def __init__(self, reads: Iterable[BoxRead], opened: Open) -> None:
        self.straight: list[tuple[ShardHeader, ReadRequest]] = []
        self._slabs: list[_Placed] = []
        self._spare: list[Passing] = []
        for read in reads:
            self._add(read, opened)

    def wanted(self) -> Iterator[tuple[ShardHeader, ReadRequest]]:
        """The bytes of each read that goes through a slab, without a destination."""
        for one in self._slabs:
            yield one.header, ReadRequest(one.key, *one.span, memoryview(b""))

    def portions(self, options: ReadOptions) -> dict[str, list[Portion]]:
        """All slabs by file and in file order, in portions that are copied as they are read.

        Each reading thread reuses its memory for every portion. A portion begins with a block and counts the
        bytes read for it, which need not be contiguous.
        """
        found: dict[str, list[Portion]] = {}
        for batch in _batches(sorted(self._slabs, key=lambda one: (one.header.path, one.start))):
            first = batch.slabs[0]
            begin = first.entry.start + first.span[0] // BLOCK * BLOCK if batch.large else first.start
            portion = first.header.portion(begin, batch.nbytes, partial(self._read, batch, options))
            found.setdefault(portion.path, []).append(portion)
        return found

    def _read(self, batch: _Batch, options: ReadOptions, handle: ReadHandle) -> None:
        """Read one portion and copy it into place."""
        memory, slabs = self._spare.pop() if self._spare else Passing(), batch.slabs
        header, spans = slabs[0].header, [one.span for one in slabs]
        try:
            if batch.large:  # slabs of one entry are copied block by block
                passing = header.read_passing(handle, slabs[0].key, spans, memory, options)
                for data, one in zip(passing, slabs, strict=True):
                    one.slab.put(data, one.destination)
                return
            room, at, requests = memory.room(batch.nbytes), 0, list[ReadRequest]()
            for one, (start, end) in zip(slabs, spans, strict=True):
                requests.append(ReadRequest(one.key, start, end, room[at : at + end - start]))
                at += end - start
            for portion in header.portions(requests, options):
                portion.read(handle)
            for one, request in zip(slabs, requests, strict=True):
                one.slab.put(request.destination, one.destination)
        finally:
            self._spare.append(memory)

    def _add(self, read: BoxRead, opened: Open) -> None:
        parts = read.parts
        problem, found = moves(parts.forms, read.leaf.shape, read.target, read.leaf.item_bytes)
        if problem:
            raise DamagedError(f"the stored parts of {read.leaf.name!r} are inconsistent: {problem}")
        name = encode_name(read.leaf.name)
        for move in found:
            text = name + parts.suffixes[move.part]
            header = opened(read.leaf, parts.nodes[move.part], text)
            for start, stop, at in move.straight:
                memory = read.destination[at : at + stop - start]
                self.straight.append((header, ReadRequest(text, start, stop, memory)))
            if move.slabs:
                entry = header.entry(text)
                self._slabs += [_Placed(header, text, entry, slab, read.destination) for slab in move.slabs]


@dataclass(frozen=True)
class _Move:
    """The wanted bytes [start, stop) of a stored part, which go to byte `at`, and slabs."""

    part: int
    straight: tuple[tuple[int, int, int], ...]
    slabs: tuple[Slab, ...]


@lru_cache(maxsize=1 << 8)
def moves(
    forms: tuple[PartForm, ...], shape: tuple[int, ...], target: LocalTarget, width: int
) -> tuple[str | None, tuple[_Move, ...]]:
    """An error of parts of these forms, or the moves that fill a target; cached, as many leaves are alike."""
    copies = [list(_copies(form, shape, target)) for form in forms]
    if problem := uncovered(target.shape, [copy.place for some in copies for copy in some]):
        return problem, ()
    found: list[_Move] = []
    for part, some in enumerate(copies):
        straight: list[tuple[int, int, int]] = []
        slabs: list[Slab] = []
        for copy in some:
            if (run := copy.straight) is None:
                slabs += copy.slabs(width)
                continue
            (start, stop), at = run
            start, stop, at = start * width, stop * width, at * width
            if straight and straight[-1][1] == start and straight[-1][2] + start - straight[-1][0] == at:
                start, _, at = straight.pop()
            straight.append((start, stop, at))
        if some:
            found.append(_Move(part, tuple(straight), tuple(slabs)))
    return None, tuple(found)


def _copies(form: PartForm, shape: tuple[int, ...], target: LocalTarget) -> Iterator[Copy]:
    """The boxes of a stored part that go into the target."""
    flat, intervals = form
    sources = list(range_boxes(shape, *intervals[0])) if flat else [intervals]
    first = 0
    for source in sources:
        for window in target.windows:
            part = intersect(source, window.box)
            if part is not None:
                moved = zip(part, window.box, window.place, strict=True)
                place = tuple((a - low + at, b - low + at) for (a, b), (low, _), (at, _) in moved)
                yield Copy(source, first, part, place, target.shape)
        first += volume(source)


@dataclass
class _Batch:
    """Slabs that are read together: of one large entry, or of some small ones of a file."""

    large: bool
    slabs: list[_Placed] = field(default_factory=list)
    nbytes: int = 0
    """Bytes read for them: of large entries whole blocks, possibly much more than is wanted."""
    _end: int = 0

    def takes(self, one: _Placed) -> bool:
        start, stop = one.span
        if self.large:
            start = max(start // BLOCK * BLOCK, self._end)
            stop = min(one.entry.nbytes, -(-stop // BLOCK) * BLOCK)
        nbytes = self.nbytes + max(0, stop - start)
        if self.slabs and nbytes > (PASSING_BYTES if self.large else TOGETHER_BYTES):
            return False
        self.slabs.append(one)
        self.nbytes, self._end = nbytes, max(self._end, stop)
        return True


def _batches(order: Iterable[_Placed]) -> Iterator[_Batch]:
    for (_, large, _), some in groupby(
        order, lambda one: (one.header.path, one.is_large, one.key if one.is_large else "")
    ):
        batch = _Batch(large)
        for one in some:
            if not batch.takes(one):
                yield batch
                batch = _Batch(large)
                batch.takes(one)
        yield batch
