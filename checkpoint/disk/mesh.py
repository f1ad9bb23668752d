"""Meshes: which boxes of a sharded leaf every node has, and which of them it stores.

A mesh is a grid of nodes; each of its dimensions splits one dimension of the tensor or holds replicas.
The places that hold the same boxes differ only along replicated dimensions. A rule of `mesh_rules` chooses
who of them stores what.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.boxes import (
    Bounds,
    Interval,
    Placement,
    Replicated,
    Sharded,
    item_bytes_of,
)
from torchrelay.checkpoint.disk.firsts import first_of_each
from torchrelay.checkpoint.disk.mesh_places import (
    Places,
    has_copies,
    intervals_at,
    near_parts,
    sides_of,
    stored_at,
    writing_places,
)
from torchrelay.checkpoint.disk.mesh_rules import RULE, Among, first_share, owner
from torchrelay.records import dataclass

Json = Any
_REMEMBERED = 1 << 12
"""Forms of leaves on nodes: a process asks for its own again and again, and for those of all once."""
_REMEMBERED_NEAR = 1 << 10
"""Forms of leaves and what was wanted of them: who loads all of a leaf has parts of all nodes in each."""
MAX_SPLIT_FACTOR = 1 << 16
"""No placements, all strides together, cut a tensor into more parts than this."""


@dataclass(frozen=True)
class Mesh:
    """Sharded over a grid of `extents`; `nodes` are those of its places in row-major order.

    There is one placement per mesh dimension, applied from left to right. Replicas share the writing by
    `rule`.
    """

    nodes: tuple[int, ...]
    extents: tuple[int, ...]
    placements: tuple[Placement, ...]
    rule: int = RULE

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
        return math.prod(n for n, one in zip(self.extents, self.placements, strict=True) if has_copies(one))

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
        form = (node, *self.alike(name, shape, item_bytes))
        found = self._stored.get(form)
        if found is None:
            coordinate, among = self._coordinate(self.place[node]), self._among(name, item_bytes)
            found = stored_at(tuple(shape), self.extents, self.placements, coordinate, among)
            if len(self._stored) >= _REMEMBERED:
                self._stored.clear()
            self._stored[form] = found
        return found

    @cached_property
    def _stored(self) -> dict[tuple[int, tuple[int, ...], int, int], tuple[Bounds, ...]]:
        return {}

    def stored(self, name: str, shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, Bounds]]:
        """All boxes of leaf `name` with the nodes that store them; they cover it exactly."""
        for node in self.nodes:
            for box in self.stored_by(node, name, shape, item_bytes):
                yield node, box

    def stored_near(
        self, name: str, shape: Sequence[int], item_bytes: int, wanted: Sequence[Bounds]
    ) -> tuple[tuple[int, Bounds], ...]:
        """What of `stored` shares elements with one of the boxes `wanted`, in the same order.

        Looks only at places that are near in every dimension: a rank that loads its part of a leaf on
        thousands of nodes asks this for every leaf.
        """
        form = (*self.alike(name, shape, item_bytes), tuple(wanted))
        found = self._near.get(form)
        if found is None:
            among = self._among(name, item_bytes)
            near = near_parts(tuple(shape), self.extents, self.placements, tuple(wanted), among)
            found = tuple((self.nodes[place], part) for place, part in near)
            if len(self._near) >= _REMEMBERED_NEAR:
                self._near.clear()
            self._near[form] = found
        return found

    @cached_property
    def _near(
        self,
    ) -> dict[tuple[tuple[int, ...], int, int, tuple[Bounds, ...]], tuple[tuple[int, Bounds], ...]]:
        return {}

    @cached_property
    def text(self) -> bytes:
        """Nodes, extents, placements and rule as canonical JSON, without the brackets around the four."""
        described = [list(self.nodes), list(self.extents), placements_json(self.placements), self.rule]
        return canonical.dumps(described)[1:-1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `text`."""
        return canonical.sha256(self.text)

    def writers(self, name: str, shape: Sequence[int], item_bytes: int) -> tuple[frozenset[int], ...]:
        """The nodes that store something of leaf `name`, as one or several sets that all leaves share."""
        form = self.alike(name, shape, item_bytes)
        if form not in self._writers:
            among = self._among(name, item_bytes)
            places = writing_places(tuple(shape), self.extents, self.placements, among)
            self._writers[form] = tuple(map(self._nodes_at, places))
        return self._writers[form]

    def writing(
        self, names: Sequence[str], forms: Iterable[tuple[tuple[int, ...], int]]
    ) -> dict[frozenset[int], str]:
        """The sets of nodes that store something of leaves, each with the name of the first that they store.

        `forms` are the shapes and bytes of the leaves. It looks once at leaves that the same nodes store.
        """
        if self.replicas == 1:  # then a name chooses nobody
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

    @cached_property
    def _writers(self) -> dict[tuple[tuple[int, ...], int, int], tuple[frozenset[int], ...]]:
        return {}

    def _nodes_at(self, places: Places) -> frozenset[int]:
        if places not in self._known_places:
            found = frozenset(self.nodes[sum(steps)] for steps in itertools.product(*places))
            self._known_places[places] = found
        return self._known_places[places]

    @cached_property
    def _known_places(self) -> dict[Places, frozenset[int]]:
        return {}

    def largest_share(self, shape: Sequence[int], item_bytes: int) -> int:
        """The most bytes that a node stores of a leaf, whatever its name."""
        sides = [sides_of(size, dim, self.extents, self.placements) for dim, size in enumerate(shape)]
        locals_ = itertools.product(*sides)
        among = Among(self.rule, self.replicas, 0, item_bytes)
        shares = (first_share(list(itertools.product(*one)), among) for one in locals_)
        return max(shares, default=0) * item_bytes

    def alike(self, name: str, shape: Sequence[int], item_bytes: int) -> tuple[tuple[int, ...], int, int]:
        """Equal for leaves that the same nodes store in the same boxes."""
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
