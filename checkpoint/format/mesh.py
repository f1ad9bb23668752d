"""Compute which boxes of a sharded leaf every node of a mesh has, and which of them it stores.

Pure functions, cached by the form of a leaf, of which a state has few. A mesh is a grid of nodes; each of its
dimensions splits one dimension of the tensor or holds replicas. Places with the same boxes differ only along
replicated dimensions. A rule of `mesh_geometry` decides which of them stores what.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import item_bytes_of
from torchrelay.checkpoint.format.mesh_geometry import (
    RULE,
    Among,
    Bounds,
    Interval,
    Placement,
    Replicated,
    Sharded,
    division,
    intersect,
    local_intervals,
    owner,
    share,
    strides_of,
    writing_replicas,
)
from torchrelay.checkpoint.format.names import first_of_each
from torchrelay.records import Json, dataclass

Lengths = tuple[int, ...]
Steps = range | tuple[int, ...]
Places = tuple[Steps, ...]
"""Places of a grid: sums of one of each steps."""


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
        replica = replica * extent + index if isinstance(placement, Replicated) else replica
    boxes = itertools.product(*intervals_at(shape, extents, placements, coordinate))
    shares = (share(box, replica, among) for box in boxes)
    return tuple(box for box in shares if box is not None)


@lru_cache(maxsize=1 << 10)
def writing_places(
    shape: tuple[int, ...], extents: tuple[int, ...], placements: tuple[Placement, ...], among: Among
) -> tuple[Places, ...]:
    """The places that store something of a leaf; checks every form of local part once, not every place."""
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
    """Stored boxes of a leaf that touch a box of `wanted`, with their places, in order."""
    copies = _copied_axes(extents, placements)
    found: dict[int, list[Bounds]] = {}
    for first, boxes in near_boxes(shape, extents, placements, wanted):
        lengths = [tuple(stop - start for start, stop in box) for box in boxes]
        for writing in writing_replicas(lengths, among):
            for replica, step in zip(writing, _replica_steps(writing, copies), strict=True):
                parts = (share(box, replica, among) for box in boxes)
                found[first + step] = [
                    part
                    for part in parts
                    if part is not None and any(intersect(part, box) is not None for box in wanted)
                ]
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


@lru_cache(maxsize=1 << 12)
def near_side(
    size: int, dim: int, extents: tuple[int, ...], placements: tuple[Placement, ...], side: Interval
) -> tuple[tuple[int, tuple[Interval, ...]], ...]:
    """Steps and intervals of the places along one dimension of a tensor whose part touches `side`."""
    axes = _axes_of(dim, placements)
    chosen: Iterable[tuple[int, ...]] | None = None
    if len(axes) == 1 and placements[axes[0]] == Sharded(dim):
        chunk = max(-(-size // extents[axes[0]]), 1)
        chosen = ((index,) for index in range(side[0] // chunk, -(-side[1] // chunk)))
    return tuple(
        (step, intervals)
        for step, intervals in _along(size, dim, extents, placements, chosen)
        if any(start < side[1] and side[0] < stop for start, stop in intervals)
    )


def _along(
    size: int,
    dim: int,
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    chosen: Iterable[tuple[int, ...]] | None = None,
) -> Iterator[tuple[int, tuple[Interval, ...]]]:
    """Steps and intervals of places along one dimension of a tensor; all, or those with `chosen` indices."""
    axes, strides = _axes_of(dim, placements), strides_of(extents)
    for indices in chosen or itertools.product(*(range(extents[axis]) for axis in axes)):
        at = dict(zip(axes, indices, strict=True))
        coordinate = [at.get(axis, 0) for axis in range(len(extents))]
        intervals = local_intervals(size, dim, extents, coordinate, placements)
        yield sum(strides[axis] * index for axis, index in at.items()), tuple(intervals)


def _axes_of(dim: int, placements: Sequence[Placement]) -> list[int]:
    """The dimensions of a mesh that split a dimension of a tensor."""
    return [axis for axis, one in enumerate(placements) if isinstance(one, Sharded) and one.dim == dim]


def _copied_axes(extents: Sequence[int], placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """Extents and strides of the dimensions of a mesh that hold replicas."""
    each = zip(extents, strides_of(extents), placements, strict=True)
    return [(extent, stride) for extent, stride, one in each if isinstance(one, Replicated)]


def _replica_steps(numbers: range, copies: Sequence[tuple[int, int]]) -> Steps:
    """Places of the replicas with these numbers, relative to the first; `copies` are extents and strides."""
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
    """Lengths of the intervals along one dimension of a tensor, with the steps of places that have them."""
    if size == 0:
        return {}
    axes = _axes_of(dim, placements)
    if not axes:
        return {(size,): range(1)}
    if len(axes) == 1 and placements[axes[0]] == Sharded(dim):
        stride, chunk = strides_of(extents)[axes[0]], -(-size // extents[axes[0]])
        full, rest = divmod(size, chunk)
        chunks: dict[Lengths, Steps] = {(chunk,): range(0, (full - 1) * stride + 1, stride)}
        return chunks | ({(rest,): range(full * stride, full * stride + 1)} if rest else {})
    found: dict[Lengths, list[int]] = defaultdict(list)
    for step, intervals in _along(size, dim, extents, placements):
        if intervals:
            found[tuple(b - a for a, b in intervals)].append(step)
    return {lengths: tuple(steps) for lengths, steps in found.items()}


@lru_cache(maxsize=1 << 14)
def intervals_at(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[Interval, ...], ...]:
    """Indices per dimension of a tensor at a coordinate of a mesh."""
    return tuple(
        tuple(local_intervals(size, dim, extents, coordinate, placements)) for dim, size in enumerate(shape)
    )


K = TypeVar("K")
V = TypeVar("V")
_REMEMBERED = 1 << 12
"""Number of cached forms of leaves on nodes: a process often needs its own, and those of all once."""
_REMEMBERED_NEAR = 1 << 10
"""Number of cached requests: a load of a whole leaf needs parts of all nodes."""
MAX_SPLIT_FACTOR = 1 << 16
"""Maximum number of parts that all strides of placements together cut a tensor into."""


def _remembered(known: dict[K, V], key: K, limit: int, make: Callable[[], V]) -> V:
    """The cached result of `make`; a full cache begins again."""
    if key not in known:
        made = make()
        if len(known) >= limit:
            known.clear()
        known[key] = made
    return known[key]


@dataclass(frozen=True)
class Mesh:
    """Sharded over a grid of `extents`, whose places are `nodes` in row-major order; replicas use `rule`."""

    nodes: tuple[int, ...]
    extents: tuple[int, ...]
    placements: tuple[Placement, ...]
    rule: int = RULE
    split = True
    """Whether different nodes store different parts of one leaf."""
    _stored: dict[Any, tuple[Bounds, ...]] = field(default_factory=dict, init=False, compare=False)
    _near: dict[Any, tuple[tuple[int, Bounds], ...]] = field(default_factory=dict, init=False, compare=False)
    _writers: dict[Any, tuple[frozenset[int], ...]] = field(default_factory=dict, init=False, compare=False)
    _nodes_at: dict[Places, frozenset[int]] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def place(self) -> dict[int, int]:
        """The place of each node in the grid."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def replicas(self) -> int:
        """Number of places that hold the same boxes."""
        return math.prod(extent for extent, _ in _copied_axes(self.extents, self.placements))

    def local_intervals(self, shape: Sequence[int], node: int) -> tuple[tuple[Interval, ...], ...]:
        """Indices per dimension of the tensor that a node of the mesh has."""
        return intervals_at(tuple(shape), self.extents, self.placements, self._coordinate(self.place[node]))

    def local_shape(self, shape: Sequence[int], node: int) -> tuple[int, ...] | None:
        """The shape of a node's local tensor; None for a node outside of the mesh."""
        if node not in self.place:
            return None
        return tuple(sum(b - a for a, b in one) for one in self.local_intervals(shape, node))

    def stored_by(self, node: int, name: str, shape: Sequence[int], item_bytes: int) -> tuple[Bounds, ...]:
        """The boxes of leaf `name` that a node stores; none outside of the mesh."""
        if node not in self.place:
            return ()
        form = (node, *self.alike(name, shape, item_bytes))

        def make() -> tuple[Bounds, ...]:
            coordinate, among = self._coordinate(self.place[node]), self._among(name, item_bytes)
            return stored_at(tuple(shape), self.extents, self.placements, coordinate, among)

        return _remembered(self._stored, form, _REMEMBERED, make)

    def stored(self, name: str, shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, Bounds]]:
        """All boxes of leaf `name` with the nodes that store them; they cover it exactly."""
        for node in self.nodes:
            for box in self.stored_by(node, name, shape, item_bytes):
                yield node, box

    def stored_near(
        self, name: str, shape: Sequence[int], item_bytes: int, wanted: Sequence[Bounds]
    ) -> tuple[tuple[int, Bounds], ...]:
        """Those of `stored` that touch a box of `wanted`; visits only places close in every dimension."""
        form = (*self.alike(name, shape, item_bytes), tuple(wanted))

        def make() -> tuple[tuple[int, Bounds], ...]:
            among = self._among(name, item_bytes)
            near = near_parts(tuple(shape), self.extents, self.placements, tuple(wanted), among)
            return tuple((self.nodes[place], part) for place, part in near)

        return _remembered(self._near, form, _REMEMBERED_NEAR, make)

    @cached_property
    def text(self) -> bytes:
        """Nodes, extents, placements and rule as canonical JSON, without the brackets around the four."""
        described = [list(self.nodes), list(self.extents), placements_json(self.placements), self.rule]
        return canonical_json.dumps(described)[1:-1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `text`."""
        return canonical_json.sha256(self.text)

    def writers(self, name: str, shape: Sequence[int], item_bytes: int) -> tuple[frozenset[int], ...]:
        """The nodes that store something of leaf `name`, as one or several sets that all leaves share."""
        form = self.alike(name, shape, item_bytes)
        if form not in self._writers:
            among = self._among(name, item_bytes)
            writing = writing_places(tuple(shape), self.extents, self.placements, among)
            for places in writing:
                if places not in self._nodes_at:
                    at = itertools.product(*places)
                    self._nodes_at[places] = frozenset(self.nodes[sum(steps)] for steps in at)
            self._writers[form] = tuple(map(self._nodes_at.__getitem__, writing))
        return self._writers[form]

    def writing(
        self, names: Sequence[str], forms: Iterable[tuple[tuple[int, ...], int]]
    ) -> dict[frozenset[int], str]:
        """The sets of nodes that store something of leaves of these shapes and bytes, with the first leaf."""
        if self.replicas == 1:  # then the name does not matter
            alike = list(first_of_each(forms, names).items())
        else:
            owners = [owner(name, self.replicas) for name in names]
            each = first_of_each(zip(forms, owners, strict=True), names)
            alike = [(form, name) for (form, _), name in each.items()]
        found: dict[frozenset[int], str] = {}
        for (shape, nbytes), name in alike:
            for nodes in self.writers(name, shape, item_bytes_of(shape, nbytes)):
                found.setdefault(nodes, name)
        return found

    def largest_share(self, shape: Sequence[int], item_bytes: int) -> int:
        """The most bytes that a node stores of a leaf of any name."""
        sides = [sides_of(size, dim, self.extents, self.placements) for dim, size in enumerate(shape)]
        among = Among(self.rule, self.replicas, 0, item_bytes)
        shares = (  # as if the node got the first chunk of every box
            sum(division(box, among).rows * math.prod(box[1:]) for box in itertools.product(*one))
            for one in itertools.product(*sides)
        )
        return max(shares, default=0) * item_bytes

    def alike(self, name: str, shape: Sequence[int], item_bytes: int) -> tuple[tuple[int, ...], int, int]:
        """Key that is equal for leaves that the same nodes store in the same boxes."""
        return (tuple(shape), item_bytes, owner(name, self.replicas))

    def _among(self, name: str, item_bytes: int) -> Among:
        return Among.of(name, self.replicas, item_bytes, self.rule)

    def _coordinate(self, place: int) -> tuple[int, ...]:
        found = []
        for extent in reversed(self.extents):
            place, index = divmod(place, extent)
            found.append(index)
        return tuple(reversed(found))


def placements_json(placements: Sequence[Placement]) -> list[Json]:
    """Per mesh dimension `[dim, split_factor]`, or null where it holds replicas."""
    return [[one.dim, one.split_factor] if isinstance(one, Sharded) else None for one in placements]


def placements_of(json: Json) -> tuple[Placement, ...] | None:
    """Read the JSON of `placements_json`; None if malformed."""
    if not isinstance(json, list):
        return None
    found: list[Placement] = []
    for one in json:
        if one is None:
            found.append(Replicated())
        elif isinstance(one, list) and [type(number) for number in one] == [int, int]:
            found.append(Sharded(*one))
        else:
            return None
    return tuple(found)
