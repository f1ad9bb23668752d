"""How long each node needed for each phase of a save or load, and which one dominates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

from torchrelay.records import dataclass


@dataclass(frozen=True)
class NodeTimes:
    """One node's part of one action: seconds by phase, and bytes moved; `path` is `prefix/node.position`.

    A save has the phases stage, plan, hash, write, fsync and, on its first node, commit; a load prove,
    read and restore.
    """

    node: str
    path: str
    bytes: int
    secs: dict[str, float] = field(default_factory=dict)

    @property
    def total_secs(self) -> float:
        """Seconds over all phases."""
        return sum(self.secs.values())

    @property
    def epoch(self) -> int | None:
        """The epoch that the path names, of a position inside of one too; None for another form of path."""
        number = self.path.rpartition(".")[2].partition("+")[0]
        return int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else None


class NodeStats(dict[str, float]):
    """Seconds by logical path, as Caffe2's handlers get them, with the details behind.

    `nodes` has the phases; `slowest` is the node that the others waited for.
    """

    def __init__(self, nodes: Iterable[NodeTimes]) -> None:
        self.nodes = tuple(nodes)
        super().__init__({times.path: times.total_secs for times in self.nodes})

    @property
    def slowest(self) -> NodeTimes | None:
        """The node with the most seconds; None when there is none."""
        return max(self.nodes, key=lambda times: times.total_secs, default=None)

    @property
    def bytes(self) -> int:
        """Bytes moved by all nodes."""
        return sum(times.bytes for times in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """The content of a try's `stats.json`."""
        slowest = self.slowest
        return {
            "bytes": self.bytes,
            "nodes": [vars(times) for times in self.nodes],
            "slowest": slowest.node if slowest else None,
        }


def node_times(said: Any) -> tuple[NodeTimes, ...]:
    """Read back what `NodeStats.to_json` made; nodes that are told otherwise are left out."""
    nodes = said.get("nodes") if isinstance(said, dict) else None
    return tuple(_times(one) for one in nodes or () if _is_told(one)) if isinstance(nodes, list) else ()


def _times(one: Any) -> NodeTimes:
    secs = {str(phase): float(secs) for phase, secs in one["secs"].items()}
    return NodeTimes(one["node"], str(one.get("path", "")), int(one.get("bytes") or 0), secs)


def _is_told(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("node"), str):
        return False
    secs, size = one.get("secs"), one.get("bytes", 0)
    return isinstance(secs, dict) and all(map(_is_amount, [*secs.values(), size]))


def _is_amount(number: Any) -> bool:
    return type(number) in (int, float) and 0 <= number < float("inf")
