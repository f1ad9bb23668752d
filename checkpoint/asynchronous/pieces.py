"""What a process stages by a plan: its pieces of tensors and their places in staging memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.checkpoint.asynchronous.arena import room
from torchrelay.checkpoint.disk.names import format_key
from torchrelay.checkpoint.planning.assignments import Assignment, Plan


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor, the key under which a shard holds it, and where it is staged."""

    assignment: Assignment
    key: str
    at: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of each hosted node of a plan; `nbytes` is what all of them take."""

    plan: Plan
    nodes: tuple[int, ...]
    by_node: tuple[tuple[Piece, ...], ...]
    nbytes: int

    def belong_to(self, plan: Plan, nodes: Sequence[int]) -> bool:
        """Whether these are the pieces of this very plan and of these nodes."""
        return self.plan is plan and self.nodes == tuple(nodes)


def pieces_of(plan: Plan, nodes: Sequence[int]) -> Pieces:
    """Lay the tensors that these nodes write out in staging memory, one behind the other."""
    at = 0
    by_node = []
    for node in nodes:
        found = []
        for one in plan.assignments(node):
            if one.leaf.kind == "tensor":
                nbytes = one.nbytes
                found.append(Piece(one, format_key(one.key), at, nbytes))
                at += room(nbytes)
        by_node.append(tuple(found))
    return Pieces(plan, tuple(nodes), tuple(by_node), at)
