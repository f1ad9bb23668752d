"""Layouts: which nodes hold which elements of a leaf, as the manifest stores it.

    Split      one byte string of leaves, alike on all its nodes, cut between them
    Replicated alike on all its nodes, written whole by the first
    PerNode    a value of its own on every node
    Mesh       sharded over a grid of nodes (`mesh`)

On disk `Split` and `Replicated` have kind `replicated` (with and without cut points), `PerNode` has
kind `node`, `Mesh` kind `mesh`. The kind `boxes` is reserved. Cut points are stored, so reading needs
no planning code. Nodes are indexes into the manifest's node table, leaves are row numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from torchrelay.checkpoint.disk.mesh import Mesh
from torchrelay.records import dataclass


class Cut(NamedTuple):
    """A place in a byte string: before element `element` of its item number `item`."""

    item: int
    element: int


@dataclass(frozen=True)
class Piece:
    """Elements `first` up to, not including, `last` of a leaf (in row-major order), held by `node`."""

    node: int
    first: int
    last: int


@dataclass(frozen=True)
class Replicated:
    """Alike on all `nodes`; the first one writes it whole."""

    nodes: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether different nodes store different parts of one leaf."""
        return False

    @property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something."""
        return self.nodes[:1]

    def pieces(self, leaf: int, size: int) -> tuple[Piece, ...]:
        """The one piece that is stored."""
        return (Piece(self.nodes[0], 0, size),)

    def stores(self, node: int) -> bool:
        """Whether `node` stores leaves, which it then does whole."""
        return node == self.nodes[0]

    def held_by(self, node: int, leaf: int, size: int) -> Piece | None:
        """What `node` stores of the leaf; None when nothing."""
        return Piece(node, 0, size) if self.stores(node) else None


@dataclass(frozen=True)
class PerNode:
    """Each of `nodes` has and writes its own."""

    nodes: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether different nodes store different parts of one leaf."""
        return False

    @property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something: all."""
        return self.nodes

    def pieces(self, leaf: int, size: int) -> tuple[Piece, ...]:
        """One whole piece per node; they are not parts of one whole."""
        return tuple(Piece(node, 0, size) for node in self.nodes)

    @cached_property
    def members(self) -> frozenset[int]:
        """The nodes as a set."""
        return frozenset(self.nodes)

    def stores(self, node: int) -> bool:
        """Whether `node` stores leaves, which it then does whole."""
        return node in self.members

    def held_by(self, node: int, leaf: int, size: int) -> Piece | None:
        """What `node` stores of the leaf; None when nothing."""
        return Piece(node, 0, size) if self.stores(node) else None


@dataclass(frozen=True)
class Split:
    """A byte string of `items` (leaf rows in order); `nodes[i]` writes from `cuts[i]` to `cuts[i + 1]`.

    Cuts rise from (0, 0) to (number of items, 0); a cut at the end of an item is written as the
    beginning of the next, so every item, an empty one too, has exactly one owner of each element.
    """

    nodes: tuple[int, ...]
    items: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def split(self) -> bool:
        """Whether different nodes store different parts of one leaf."""
        return True

    @cached_property
    def index(self) -> dict[int, int]:
        """Leaf row to place in the string."""
        return {leaf: item for item, leaf in enumerate(self.items)}

    @cached_property
    def writer(self) -> dict[int, int]:
        """Node to the number of its share."""
        return {node: share for share, node in enumerate(self.nodes)}

    @cached_property
    def whole(self) -> dict[int, int]:
        """The leaf rows that no cut divides, each with the node that stores it."""
        found: dict[int, int] = {}
        for node, start, stop in zip(self.nodes, self.cuts, self.cuts[1:], strict=False):
            found.update(dict.fromkeys(self.items[start.item + (start.element > 0) : stop.item], node))
        return found

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something: those whose cuts are not one place."""
        return tuple(node for node, a, b in zip(self.nodes, self.cuts, self.cuts[1:], strict=False) if a != b)

    def pieces(self, leaf: int, size: int) -> tuple[Piece, ...]:
        """The stored pieces of a leaf of `size` elements, in order; they cover it exactly."""
        item = self.index[leaf]
        share = bisect_right(self.cuts, Cut(item, 0)) - 1
        found: list[Piece] = []
        while share < len(self.nodes) and self.cuts[share] < Cut(item + 1, 0):
            piece = self._piece(share, item, size)
            if piece is not None:
                found.append(piece)
            share += 1
        return tuple(found)

    def held_by(self, node: int, leaf: int, size: int) -> Piece | None:
        """What `node` stores of the leaf; None when nothing."""
        share = self.writer.get(node)
        return None if share is None else self._piece(share, self.index[leaf], size)

    def items_of(self, node: int) -> Iterator[int]:
        """The leaf rows of which `node` may store something."""
        share = self.writer.get(node)
        if share is not None:
            start, stop = self.cuts[share], self.cuts[share + 1]
            last = min(stop.item + (stop.element > 0), len(self.items))
            yield from self.items[start.item : last] if start < stop else ()

    def _piece(self, share: int, item: int, size: int) -> Piece | None:
        start, stop = self.cuts[share], self.cuts[share + 1]
        if not (start < stop and start < Cut(item + 1, 0) and stop > Cut(item, 0)):
            return None
        first = start.element if start.item == item else 0
        last = stop.element if stop.item == item else size
        return Piece(self.nodes[share], first, last)


Layout = Replicated | PerNode | Split | Mesh
