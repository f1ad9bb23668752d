"""Meshes: which boxes of a sharded leaf every node has, and which of them it stores.

A mesh is a grid of nodes; each of its dimensions splits one dimension of the tensor or holds replicas.
The places that hold the same boxes differ only along replicated dimensions. Rule 1 chooses who of them
stores what, from the leaf alone; it is part of the disk format, so readers need nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torchrelay.checkpoint.disk.boxes import (
    Bounds,
    Interval,
    Placement,
    Replicated,
    Sharded,
    local_intervals,
    pieces,
    volume,
)

Json = Any
RULE = 1
"""The version of the rule by which replicas share the writing."""
SPLIT_BYTES = 1 << 20
"""Replicas divide a box of at least so many bytes; a smaller one has one owner."""
MAX_SPLIT_FACTOR = 1 << 16
"""No placements, all strides together, cut a tensor into more parts than this."""


@dataclass(frozen=True)
class Mesh:
    """Sharded over a grid of `extents`; `nodes` are those of its places in row-major order.

    There is one placement per mesh dimension, applied from left to right.
    """

    nodes: tuple[int, ...]
    extents: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def split(self) -> bool:
        """Whether different nodes store different parts of one leaf."""
        return True

    @cached_property
    def place(self) -> dict[int, int]:
        """Node to its place in the grid."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def replicas(self) -> int:
        """How many places hold the same boxes."""
        return math.prod(n for n, one in zip(self.extents, self.placements, strict=True) if _copies(one))

    def local_intervals(self, shape: Sequence[int], node: int) -> tuple[tuple[Interval, ...], ...]:
        """Per dimension of the tensor, the indices that a node of the mesh has."""
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
        boxes = itertools.product(*self.local_intervals(shape, node))
        replica = self._replica(self._coordinate(self.place[node]))
        shares = (self._share(box, replica, name, item_bytes) for box in boxes)
        return tuple(box for box in shares if box is not None)

    def stored(self, name: str, shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, Bounds]]:
        """All boxes of leaf `name` with the nodes that store them; they cover it exactly."""
        for node in self.nodes:
            for box in self.stored_by(node, name, shape, item_bytes):
                yield node, box

    def alike(self, name: str, shape: Sequence[int], item_bytes: int) -> tuple[object, ...]:
        """Equal for leaves that the same nodes store in the same boxes."""
        return (tuple(shape), item_bytes, _owner(name, self.replicas) if self.replicas > 1 else 0)

    def _share(self, box: Bounds, replica: int, name: str, item_bytes: int) -> Bounds | None:
        if self.replicas == 1:
            return box
        if volume(box) * item_bytes >= SPLIT_BYTES and box[:1] and box[0][1] - box[0][0] >= self.replicas:
            rows = pieces(box[:1], self.replicas, replica)
            return (rows[0], *box[1:]) if rows else None
        return box if replica == _owner(name, self.replicas) else None

    def _coordinate(self, place: int) -> tuple[int, ...]:
        found = []
        for extent in reversed(self.extents):
            place, index = divmod(place, extent)
            found.append(index)
        return tuple(reversed(found))

    def _replica(self, coordinate: Sequence[int]) -> int:
        number = 0
        for index, extent, placement in zip(coordinate, self.extents, self.placements, strict=True):
            number = number * extent + index if _copies(placement) else number
        return number


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


def _copies(placement: Placement) -> bool:
    return isinstance(placement, Replicated)


def _owner(name: str, replicas: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % replicas


def placements_json(placements: Sequence[Placement]) -> list[Json]:
    """Per mesh dimension `[dim, split_factor]`, or null where it holds replicas."""
    return [[one.dim, one.split_factor] if isinstance(one, Sharded) else None for one in placements]


def placements_of(json: Json) -> tuple[Placement, ...] | None:
    """Read what `placements_json` made; None for anything else."""
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
