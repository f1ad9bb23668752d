"""Compute boxes of tensors on device meshes, and how replicas of a box share its writing.

Pure arithmetic on half-open intervals of indices; part of the disk format, with test vectors in
`tests/golden/boxes.json`. `Shard` splits as `torch.chunk` does: all chunks have the size ceil(total / n), the
last ones may be shorter or empty.

A rule depends only on the leaf and the box, so neither writers nor readers need messages. Mesh layouts name
their rule. Rule 1 has no lower bound for pieces: thousands of replicas made thousands of pieces of a box of 1
MiB, which every reader had to find.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from torchrelay.records import dataclass

Interval = tuple[int, int]
Bounds = tuple[Interval, ...]
"""One half-open interval per dimension; the box of a 0-d tensor has none and holds one element."""


@dataclass(frozen=True)
class Sharded:
    """A mesh dimension that splits tensor dimension `dim`.

    With `split_factor` above 1 every place takes its chunk of each of that many equal parts (torch's strided
    shard, the result of splitting one dimension in the reverse order).
    """

    dim: int
    split_factor: int = 1


@dataclass(frozen=True)
class Replicated:
    """A mesh dimension whose places all hold the same."""


Placement = Sharded | Replicated


def pieces(intervals: Sequence[Interval], parts: int, index: int) -> list[Interval]:
    """Chunk `index` of `parts` of the concatenation of intervals."""
    chunk = -(-sum(stop - start for start, stop in intervals) // parts)
    found, passed = [], 0
    for start, stop in intervals:
        first, last = max(index * chunk - passed, 0), min((index + 1) * chunk - passed, stop - start)
        if first < last:
            found.append((start + first, start + last))
        passed += stop - start
    return found


def local_intervals(
    size: int, dim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Interval]:
    """Indices along `dim`, of `size`, at a coordinate of the mesh; placements apply left to right."""
    intervals: list[Interval] = [(0, size)]
    for places, place, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Sharded) and placement.dim == dim:
            blocks = [
                pieces(intervals, placement.split_factor, block) for block in range(placement.split_factor)
            ]
            intervals = [part for block in blocks for part in pieces(block, places, place)]
    return merged(intervals)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Join adjacent intervals, in the given order; drops empty ones."""
    found: list[Interval] = []
    for start, stop in intervals:
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def volume(box: Bounds) -> int:
    """Elements in a box."""
    return math.prod(max(0, stop - start) for start, stop in box)


def whole(shape: Sequence[int]) -> Bounds:
    """The box of the whole shape."""
    return tuple((0, size) for size in shape)


def intersect(one: Bounds, other: Bounds) -> Bounds | None:
    """The intersection of two boxes; None if empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def runs(outer: Bounds, inner: Bounds) -> Iterator[Interval]:
    """Ranges, ascending and maximal, of the box `inner` in the row-major elements of the box `outer`."""
    if volume(inner) == 0:
        return
    extents = [stop - start for start, stop in outer]
    strides = strides_of(extents)
    differ = [dim for dim, sides in enumerate(zip(outer, inner, strict=True)) if sides[0] != sides[1]]
    split = differ[-1] if differ else 0  # from here on `inner` is one run of the elements of `outer`
    length = volume(inner[split:])
    base = sum((inner[d][0] - outer[d][0]) * strides[d] for d in range(split, len(inner)))
    for index in itertools.product(*(range(*interval) for interval in inner[:split])):
        start = base + sum((index[d] - outer[d][0]) * strides[d] for d in range(split))
        yield start, start + length


def strides_of(extents: Sequence[int]) -> list[int]:
    """Strides of the dimensions of a grid in row-major order."""
    return [math.prod(extents[dim + 1 :]) for dim in range(len(extents))]


def range_boxes(shape: Sequence[int], first: int, last: int) -> Iterator[Bounds]:
    """The boxes, in order, of elements [first, last) of a tensor in row-major order."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    (start, head), (stop, tail) = divmod(first, row), divmod(last, row)
    if start == stop:
        yield from (((start, start + 1), *box) for box in range_boxes(shape[1:], head, tail))
        return
    if head:
        yield from (((start, start + 1), *box) for box in range_boxes(shape[1:], head, row))
        start += 1
    if start < stop:
        yield ((start, stop), *whole(shape[1:]))
    yield from (((stop, stop + 1), *box) for box in range_boxes(shape[1:], 0, tail))


def uncovered(shape: Sequence[int], boxes: Sequence[Bounds]) -> str | None:
    """Check that boxes, of which empty ones are ignored, cover a shape exactly once; None, or the error."""
    for box in boxes:
        outside = len(box) != len(shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=False)
        )
        if outside:
            return f"{describe(box)} does not lie in shape {list(shape)}"
    if volume(whole(shape)) == 0:
        return None
    return _uncovered(whole(shape), [box for box in boxes if volume(box)], ())


def _uncovered(space: Bounds, boxes: Sequence[Bounds], prefix: Bounds) -> str | None:
    if len(boxes) == 1 and boxes[0] == space:
        return None
    if not boxes:
        return f"nothing covers {describe((*prefix, *space))}"
    if not space:
        return f"{len(boxes)} boxes cover {describe(prefix)}"
    for slab, crossing in _slabs(space[0], boxes):
        if problem := _uncovered(space[1:], crossing, (*prefix, slab)):
            return problem
    return None


def _slabs(interval: Interval, boxes: Sequence[Bounds]) -> Iterator[tuple[Interval, list[Bounds]]]:
    """Cut the first dimension at the borders of all boxes; with each slab, the rest of its boxes."""
    starts = sorted(boxes, key=lambda box: box[0])
    cuts = sorted({*interval, *(edge for box in boxes for edge in box[0])})
    active: list[Bounds] = []
    following = 0
    for slab in itertools.pairwise(cuts):
        active = [box for box in active if box[0][1] > slab[0]]
        while following < len(starts) and starts[following][0][0] <= slab[0]:
            active.append(starts[following])
            following += 1
        yield slab, [box[1:] for box in active]


def describe(box: Bounds) -> str:
    """A box in the notation of tensor keys: [0:4,2:6]."""
    return "[" + ",".join(f"{start}:{stop}" for start, stop in box) + "]"


def halves(box: Bounds) -> list[Bounds]:
    """A box of more than one element in two, along its first dimension that can be cut."""
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    middle = (start + stop) // 2
    return [(*box[:dim], side, *box[dim + 1 :]) for side in ((start, middle), (middle, stop))]


@dataclass(frozen=True)
class Window:
    """The box `box` of a leaf belongs in the box `place`, of the same extents, of a destination."""

    box: Bounds
    place: Bounds


@dataclass(frozen=True)
class LocalTarget:
    """A destination of `shape`, and the parts of a leaf that belong in it; their places cover it exactly."""

    shape: tuple[int, ...]
    windows: tuple[Window, ...]


def whole_target(shape: Sequence[int]) -> LocalTarget:
    """A destination for a whole leaf."""
    everything = whole(shape)
    return LocalTarget(tuple(shape), (Window(everything, everything),))


def local_target(intervals: Sequence[Sequence[Interval]]) -> LocalTarget:
    """A local tensor that has these indices of each dimension, in this order."""
    placed = [_placed(one) for one in intervals]
    windows = tuple(
        Window(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        for pairs in itertools.product(*placed)
    )
    return LocalTarget(tuple(sum(b - a for a, b in one) for one in intervals), windows)


def place_of(intervals: Sequence[Sequence[Interval]], box: Bounds) -> Bounds:
    """The place of a box in a `local_target`; each side of it is within one of the intervals."""
    return tuple(
        next((a - low + at, b - low + at) for (low, high), (at, _) in _placed(one) if low <= a and b <= high)
        for one, (a, b) in zip(intervals, box, strict=True)
    )


def _placed(intervals: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    found, at = [], 0
    for start, stop in intervals:
        found.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return found


RULE = 2
"""The rule of this version's writer."""
KNOWN = frozenset((1, 2))
SPLIT_BYTES = 1 << 20
"""Replicas divide a box of at least so many bytes, by rule 2 into pieces of about this size."""


class Among(NamedTuple):
    """The replicas of a leaf's boxes: their rule and number, and the one that the leaf's name selects."""

    rule: int
    replicas: int
    owner: int
    item_bytes: int

    @classmethod
    def of(cls, name: str, replicas: int, item_bytes: int, rule: int) -> Among:
        """The replicas of leaf `name`."""
        return cls(rule, replicas, owner(name, replicas), item_bytes)


class Division(NamedTuple):
    """Chunks of `rows` indices of a box's first dimension, stored in turn from replica `first` on."""

    rows: int
    chunks: int
    first: int


def owner(name: str, replicas: int) -> int:
    """The replica that a leaf's name selects."""
    if replicas == 1:
        return 0
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % replicas


def division(lengths: Sequence[int], among: Among) -> Division:
    """The division of a box of these lengths among replicas."""
    rows = lengths[0] if lengths else 1
    nbytes = math.prod(lengths) * among.item_bytes
    if among.rule == 1:
        divided = nbytes >= SPLIT_BYTES and rows >= among.replicas
        most, first = (among.replicas, 0) if divided else (1, among.owner)
    else:
        most, first = min(among.replicas, rows, nbytes // SPLIT_BYTES), among.owner
    chunk = -(-rows // max(most, 1))
    return Division(chunk, -(-rows // chunk), first)


def share(box: Bounds, replica: int, among: Among) -> Bounds | None:
    """The part of a box that one of its replicas stores; None for nothing."""
    if among.replicas == 1:
        return box
    rows, chunks, first = division([stop - start for start, stop in box], among)
    number = (replica - first) % among.replicas
    if number >= chunks:
        return None
    if chunks == 1:
        return box
    start, stop = box[0]
    return ((start + number * rows, min(start + (number + 1) * rows, stop)), *box[1:])


def writing_replicas(boxes: Sequence[Sequence[int]], among: Among) -> list[range]:
    """The numbers of the replicas that store something of boxes of these lengths."""
    found: set[int] = set()
    for _, chunks, first in {division(lengths, among) for lengths in boxes}:
        found.update((first + number) % among.replicas for number in range(chunks))
    runs = groupby(enumerate(sorted(found)), lambda placed: placed[1] - placed[0])
    return [range(one[0][1], one[-1][1] + 1) for one in (list(run) for _, run in runs)]
