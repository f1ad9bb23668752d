"""Nodes and the cluster that they are declared in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torchrelay.jobs.context import Managed
from torchrelay.jobs.names import check_node_name


class Cluster(Managed):
    """The nodes that were declared while it was current: ordered, each once.

    The options of a node (what a scheduler wants to know of it) are kept; where a node is declared
    again with other values, the earlier value of each option wins.
    """

    def __init__(self) -> None:
        self._options: dict[str, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"Cluster({', '.join(self._options)})"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the declared nodes in the order of their first declaration."""
        return tuple(self._options)

    def declare(self, name: str, **options: Any) -> None:
        """Add a node; raises UsageError for a bad name."""
        known = self._options.setdefault(check_node_name(name), {})
        self._options[name] = {**options, **known}

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the options of a declared node; raises KeyError for another."""
        return MappingProxyType(self._options[name])


class Node(Managed):
    """A named place where tasks run and a workspace lives; only the name counts.

    Inside `with Node("trainer_0"):` new tasks belong to that node. A node is declared in the
    current Cluster, if there is one. Raises UsageError for a bad name.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name = check_node_name(name)
        cluster = Cluster.current(required=False)
        if cluster is not None:
            cluster.declare(name, **options)

    def __repr__(self) -> str:
        return f"Node({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def node_name(node: str | Node | None) -> str | None:
    """Return the checked name of a node given as itself or by name; None means the current node, if any."""
    if node is None:
        node = Node.current(required=False)
    if node is None or isinstance(node, Node):
        return node.name if node else None
    return check_node_name(node)
