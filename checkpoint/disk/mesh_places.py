"""Places of a mesh, a grid of `extents` on which `placements` lay a tensor: which have, store or touch what.

Pure functions, remembered by the form of a leaf, of which a state has few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torchrelay.checkpoint.disk.boxes import (
    Bounds,
    Interval,
    Placement,
    Replicated,
    Sharded,
    intersect,
    local_intervals,
)
from torchrelay.checkpoint.disk.mesh_rules import Among, share, writing_replicas

Lengths = tuple[int, ...]
Steps = range | tuple[int, ...]
Places = tuple[Steps, ...]
"""Places of a grid: one of each steps, added up."""


@lru_cache(maxsize=1 << 12)
def stored_at(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    among: Among,
) -> tuple[Bounds, ...]:
    """The boxes of a leaf that the node at a coordinate of a mesh stores."""
    replica = 0
    for index, extent, placement in zip(coordinate, extents, placements, strict=True):
        replica = replica * extent + index if has_copies(placement) else replica
    boxes = itertools.product(*intervals_at(shape, extents, placements, coordinate))
    shares = (share(box, replica, among) for box in boxes)
    return tuple(box for box in shares if box is not None)


@lru_cache(maxsize=1 << 10)
def writing_places(
    shape: tuple[int, ...], extents: tuple[int, ...], placements: tuple[Placement, ...], among: Among
) -> tuple[Places, ...]:
    """The places that store something of a leaf.

    Looks at every form of local part once, not at every place.
    """
    sides = [sides_of(size, dim, extents, placements) for dim, size in enumerate(shape)]
    copies = _copied_axes(extents, placements)
    found: dict[Places, None] = {}
    for local in itertools.product(*(one.items() for one in sides)):
        boxes = list(itertools.product(*(lengths for lengths, _ in local)))
        for writing in writing_replicas(boxes, among):
            found[(*(steps for _, steps in local), _replica_steps(writing, copies))] = None
    return tuple(found)


def near_parts(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    wanted: tuple[Bounds, ...],
    among: Among,
) -> tuple[tuple[int, Bounds], ...]:
    """What places store of a leaf that touches a box of `wanted`, in their order."""
    copies = _copied_axes(extents, placements)
    found: dict[int, list[Bounds]] = {}
    for first, boxes in near_boxes(shape, extents, placements, wanted):
        lengths = [tuple(stop - start for start, stop in box) for box in boxes]
        for writing in writing_replicas(lengths, among):
            for replica, step in zip(writing, _replica_steps(writing, copies), strict=True):
                parts = (share(box, replica, among) for box in boxes)
                near = [part for part in parts if part is not None and _touches(part, wanted)]
                found[first + step] = near
    return tuple((place, part) for place in sorted(found) for part in found[place])


@lru_cache(maxsize=1 << 12)
def near_boxes(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    wanted: tuple[Bounds, ...],
) -> tuple[tuple[int, tuple[Bounds, ...]], ...]:
    """The local parts of a leaf that touch a box: the first of the places that have each, and its boxes."""
    found: dict[int, tuple[Bounds, ...]] = {}
    for box in wanted:
        sides = [
            near_side(size, dim, extents, placements, side)
            for dim, (size, side) in enumerate(zip(shape, box, strict=True))
        ]
        for local in itertools.product(*sides):
            boxes = tuple(itertools.product(*(intervals for _, intervals in local)))
            found[sum(step for step, _ in local)] = boxes
    return tuple(found.items())


def _touches(part: Bounds, wanted: Sequence[Bounds]) -> bool:
    return any(intersect(part, box) is not None for box in wanted)


@lru_cache(maxsize=1 << 12)
def near_side(
    size: int, dim: int, extents: tuple[int, ...], placements: tuple[Placement, ...], side: Interval
) -> tuple[tuple[int, tuple[Interval, ...]], ...]:
    """Where along one dimension of a tensor the places are whose part of it touches `side`.

    Each with its step from the first place, and the intervals that it has.
    """
    axes = _axes_of(dim, placements)
    strides = _strides(extents)
    if len(axes) == 1 and placements[axes[0]] == Sharded(dim):
        chunk = -(-size // extents[axes[0]])
        chosen: Iterator[tuple[int, ...]] = (
            (index,) for index in range(side[0] // max(chunk, 1), -(-side[1] // max(chunk, 1)))
        )
    else:
        chosen = itertools.product(*(range(extents[axis]) for axis in axes))
    found = []
    for indices in chosen:
        at = dict(zip(axes, indices, strict=True))
        coordinate = [at.get(axis, 0) for axis in range(len(extents))]
        intervals = local_intervals(size, dim, extents, coordinate, placements)
        if any(start < side[1] and side[0] < stop for start, stop in intervals):
            step = sum(strides[axis] * index for axis, index in at.items())
            found.append((step, tuple(intervals)))
    return tuple(found)


def _axes_of(dim: int, placements: Sequence[Placement]) -> list[int]:
    """The dimensions of a mesh that split a dimension of a tensor."""
    return [axis for axis, one in enumerate(placements) if isinstance(one, Sharded) and one.dim == dim]


def _strides(extents: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dimension of a mesh are in row-major order."""
    return [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]


def _copied_axes(extents: Sequence[int], placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """Extents and strides of the dimensions of a mesh that hold replicas."""
    each = zip(extents, _strides(extents), placements, strict=True)
    return [(extent, stride) for extent, stride, one in each if has_copies(one)]


def _replica_steps(numbers: range, copies: Sequence[tuple[int, int]]) -> Steps:
    """Where the replicas of these numbers are, relative to the first; `copies` are extents and strides."""
    if len(copies) == 1:
        stride = copies[0][1]
        return range(numbers.start * stride, (numbers.stop - 1) * stride + 1, stride)
    found = []
    for number in numbers:
        step, left = 0, number
        for extent, stride in reversed(copies):
            left, index = divmod(left, extent)
            step += index * stride
        found.append(step)
    return tuple(found)


@lru_cache(maxsize=1 << 10)
def sides_of(
    size: int, dim: int, extents: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[Lengths, Steps]:
    """The lengths of intervals that places have along one dimension of a tensor, and where these places are.

    Places without any are left out. A step is that from the first place along the dimensions of the mesh
    that split this one.
    """
    if size == 0:
        return {}
    strides, axes = _strides(extents), _axes_of(dim, placements)
    if not axes:
        return {(size,): range(1)}
    if len(axes) == 1 and placements[axes[0]] == Sharded(dim):
        return _chunks(size, extents[axes[0]], strides[axes[0]])
    found: dict[Lengths, list[int]] = {}
    for indices in itertools.product(*(range(extents[axis]) for axis in axes)):
        at = dict(zip(axes, indices, strict=True))
        coordinate = [at.get(axis, 0) for axis in range(len(extents))]
        lengths = tuple(b - a for a, b in local_intervals(size, dim, extents, coordinate, placements))
        if lengths:
            step = sum(strides[axis] * index for axis, index in at.items())
            found.setdefault(lengths, []).append(step)
    return {lengths: tuple(steps) for lengths, steps in found.items()}


def _chunks(size: int, places: int, stride: int) -> dict[Lengths, Steps]:
    chunk = -(-size // places)
    full, rest = divmod(size, chunk)
    found: dict[Lengths, Steps] = {(chunk,): range(0, (full - 1) * stride + 1, stride)}
    if rest:
        found[rest,] = range(full * stride, full * stride + 1)
    return found


@lru_cache(maxsize=1 << 14)
def intervals_at(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[Interval, ...], ...]:
    """Per dimension of a tensor, the indices at a coordinate of a mesh."""
    return tuple(
        tuple(local_intervals(size, dim, extents, coordinate, placements)) for dim, size in enumerate(shape)
    )


def has_copies(placement: Placement) -> bool:
    """Whether the places along a dimension of a mesh hold the same."""
    return isinstance(placement, Replicated)
