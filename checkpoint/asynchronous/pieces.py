"""What a process stages by a plan: its pieces of tensors and their places in staging memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from torchrelay.checkpoint.asynchronous.arena import Block, Room, room
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.planning.assignments import Assignment, Plan
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a tensor, the key under which a shard holds it, and where it is staged."""

    assignment: Assignment
    key: str
    at: int
    nbytes: int
    entire: bool
    """Whether it is all of a tensor that lies on one node."""


@dataclass(frozen=True)
class Rooms:
    """Places in staging memory, one per piece, and their bytes by the pieces' keys."""

    rooms: tuple[Room, ...]
    views: Mapping[str, memoryview]


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of each hosted node of a plan; `nbytes` is what all of them take."""

    plan: Plan
    nodes: tuple[int, ...]
    by_node: tuple[tuple[Piece, ...], ...]
    nbytes: int
    _rooms: list[Any] = field(default_factory=list)

    def rooms_in(self, block: Block) -> tuple[Rooms, ...]:
        """Where the pieces of each node are staged in a block; the same objects for the same block."""
        if not self._rooms or self._rooms[0] is not block:
            self._rooms[:] = [block, tuple(_rooms(part, block) for part in self.by_node)]
        rooms: tuple[Rooms, ...] = self._rooms[1]
        return rooms

    def belong_to(self, plan: Plan, nodes: Sequence[int]) -> bool:
        """Whether these are the pieces of this very plan and of these nodes."""
        return self.plan is plan and self.nodes == tuple(nodes)


def _rooms(pieces: Sequence[Piece], block: Block) -> Rooms:
    rooms = tuple(Room(block, one.at, one.nbytes) for one in pieces)
    return Rooms(rooms, {one.key: room.view for one, room in zip(pieces, rooms, strict=True)})


def pieces_of(plan: Plan, nodes: Sequence[int]) -> Pieces:
    """Lay the tensors that these nodes write out in staging memory, one behind the other."""
    at = 0
    by_node = []
    for node in nodes:
        found = []
        for one in plan.assignments(node):
            if one.leaf.kind == "tensor":
                nbytes = one.nbytes
                entire = one.box is None and one.whole
                found.append(Piece(one, format_key(one.key), at, nbytes, entire))
                at += room(nbytes)
        by_node.append(tuple(found))
    return Pieces(plan, tuple(nodes), tuple(by_node), at)
