"""What a plan says: every leaf with its layout, and who writes what of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk.boxes import Bounds, volume
from torchrelay.checkpoint.disk.layouts import Layout, Split
from torchrelay.checkpoint.disk.manifest import VALUE_LIMIT_BYTES
from torchrelay.checkpoint.disk.mesh import Mesh, placements_json
from torchrelay.checkpoint.disk.names import Flat, Key, Whole
from torchrelay.checkpoint.disk.parts import box_key

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec


@dataclass(frozen=True)
class NodeClass:
    """Nodes (by rank) that have the same leaves."""

    nodes: tuple[int, ...]
    leaves: tuple[LeafSpec, ...]


@dataclass(frozen=True)
class Assignment:
    """Elements `first` up to, not including, `last` of a leaf that one node writes; a value has (0, 1)."""

    leaf: LeafSpec
    first: int
    last: int
    inline: bool = False
    """A small replicated value: it goes into the manifest, not into a shard."""
    box: Bounds | None = None
    """The part of a sharded leaf; `first` and `last` then only count its elements."""

    @property
    def whole(self) -> bool:
        """Whether the node writes all of the leaf."""
        return self.last - self.first == elements(self.leaf)

    @property
    def key(self) -> Key:
        """The name under which a shard holds it."""
        if self.box is not None:
            return box_key(self.leaf.name, self.leaf.shape, self.box)
        return Whole(self.leaf.name) if self.whole else Flat(self.leaf.name, self.first, self.last)

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor's part; 0 for a value."""
        count = elements(self.leaf)
        return self.leaf.nbytes // count * (self.last - self.first) if count else 0


@dataclass(frozen=True)
class PlannedLeaf:
    """A leaf, its scope, and the number of its layout."""

    leaf: LeafSpec
    scope: str
    layout: int

    @property
    def inline(self) -> bool:
        """Whether this is a replicated value that is small enough for the manifest."""
        leaf = self.leaf
        return leaf.kind == "value" and self.scope == "replicated" and leaf.nbytes <= VALUE_LIMIT_BYTES


@dataclass(frozen=True)
class Plan:
    """Every leaf of the job with its layout; rows are in the order of the manifest."""

    rows: tuple[PlannedLeaf, ...]
    layouts: tuple[Layout, ...]
    hash: str

    def assignments(self, node: int) -> tuple[Assignment, ...]:
        """What a node writes, in the order of the rows; aliases are written under their first name only."""
        found = []
        for row in self._rows_of(node):
            planned = self.rows[row]
            layout = self.layouts[planned.layout]
            if planned.leaf.alias_of is not None:
                continue
            if isinstance(layout, Mesh):
                found += _boxes(planned.leaf, layout, node)
            elif (piece := layout.held_by(node, row, elements(planned.leaf))) is not None:
                found.append(Assignment(planned.leaf, piece.first, piece.last, planned.inline))
        return tuple(found)

    def files(self, node: int) -> dict[str, tuple[Assignment, ...]]:
        """What a node writes into its files, per group; values that go into the manifest are left out."""
        groups: dict[str, list[Assignment]] = {}
        for assignment in self.assignments(node):
            if not assignment.inline:
                groups.setdefault(assignment.leaf.group, []).append(assignment)
        return {group: tuple(found) for group, found in sorted(groups.items())}

    @cached_property
    def _unsplit(self) -> tuple[int, ...]:
        return tuple(r for r, p in enumerate(self.rows) if not isinstance(self.layouts[p.layout], Split))

    def _rows_of(self, node: int) -> list[int]:
        split = [row for lay in self.layouts if isinstance(lay, Split) for row in lay.items_of(node)]
        return sorted({*self._unsplit, *split})


def _boxes(leaf: LeafSpec, mesh: Mesh, node: int) -> list[Assignment]:
    boxes = mesh.stored_by(node, leaf.name, leaf.shape, item_bytes(leaf))
    return [Assignment(leaf, 0, volume(box), box=box) for box in boxes]


def item_bytes(leaf: LeafSpec) -> int:
    """Bytes of one element of a tensor."""
    count = elements(leaf)
    return leaf.nbytes // count if count else 1


def elements(leaf: LeafSpec) -> int:
    """The number of elements of a tensor; a value counts as one."""
    return prod(leaf.shape) if leaf.kind == "tensor" else 1


def identity(leaf: LeafSpec) -> list[object]:
    """What makes leaves of two nodes the same leaf. The size of a value may differ between them."""
    size = leaf.nbytes if leaf.kind == "tensor" else 0
    place = [leaf.name, leaf.blob, leaf.group, leaf.alias_of]
    described: list[object] = [*place, leaf.kind, leaf.role.value, leaf.dtype, list(leaf.shape), size]
    mesh = leaf.sharding
    if mesh is None:
        return described
    return [*described, list(mesh.nodes), list(mesh.extents), placements_json(mesh.placements)]


def sorted_leaves(leaves: Iterable[LeafSpec]) -> list[LeafSpec]:
    """Leaves in the order of their names."""
    return sorted(leaves, key=lambda leaf: leaf.name)
