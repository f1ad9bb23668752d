"""What each node takes from an epoch: its own values, shared ones, or what a policy makes of the others'.

A leaf that every node shares is for all. A leaf of scope `rank` is its node's. When the nodes are not
those of the epoch, the blob's policy decides: "error" (the default) refuses, "drop" leaves the blob as
the program made it, "by_rank" lets known nodes take theirs and leaves new ones as they are, and a
callable `policy(values, place)` makes a value from those of all old nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrelay.checkpoint.disk.dtypes import by_name, memory_of, torch_dtype
from torchrelay.checkpoint.disk.manifest import LeafRow, Manifest
from torchrelay.checkpoint.members import Member
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import RESHARD_POLICIES
from torchrelay.jobs.places import NodePlace


@dataclass
class Assigned:
    """What one node takes: stored leaves, their values, and what is left as it is."""

    rows: dict[str, LeafRow] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Leaves that stay as the program made them."""
    random: list[str] = field(default_factory=list)
    computed: dict[str, Any] = field(default_factory=dict)
    """Blobs that a policy made from those of all nodes."""


def assign(
    manifest: Manifest,
    place: NodePlace,
    nodes: Sequence[str],
    members: Mapping[str, Member],
    reader: LeafReader,
) -> Assigned:
    """Decide for one node; raises UsageError that names every blob without a policy for these nodes.

    `place` and `nodes` have the names under which nodes are stored.
    """
    node = place.name
    found = Assigned()
    refused: dict[str, str] = {}
    for name, rows in manifest.rows.items():
        own = _own_row(manifest, rows, node)
        leaf = manifest.leaves[rows[0] if own is None else own]
        if leaf.role == "rng":
            found.random += [name] if own is not None else []
        elif leaf.scope != "rank":
            _take(found, name, leaf, reader, node)
        else:
            policy = members[leaf.blob].reshard if leaf.blob in members else None
            _assign_rank_leaf(_Case(manifest, place, nodes, name, leaf, own, policy), found, refused, reader)
    if refused:
        raise UsageError(_refusal(manifest, nodes, refused))
    return found


@dataclass(frozen=True)
class _Case:
    """A leaf of scope `rank`, seen from one node."""

    manifest: Manifest
    place: NodePlace
    nodes: Sequence[str]
    name: str
    leaf: LeafRow
    own: int | None
    policy: Any

    @property
    def old_nodes(self) -> tuple[str, ...]:
        """The nodes that had the leaf."""
        rows = self.manifest.rows[self.name]
        numbers = {n for row in rows for n in self.manifest.nodes_of(self.manifest.leaves[row])}
        return tuple(self.manifest.world.names[number] for number in sorted(numbers))

    @property
    def fits(self) -> bool:
        """Whether every node that had the leaf is here, and every one that should have it had it."""
        old, here = set(self.old_nodes), set(self.nodes)
        everywhere = old >= set(self.manifest.world.nodes)
        return old == here if everywhere else old <= here


def _assign_rank_leaf(case: _Case, found: Assigned, refused: dict[str, str], reader: LeafReader) -> None:
    if case.fits:
        if case.own is not None:
            _take(found, case.name, case.leaf, reader, case.place.name)
    elif callable(case.policy):
        _compute(case, found, reader)
    elif case.policy == "drop" or (case.policy == "by_rank" and case.own is None):
        found.kept.add(case.name)
    elif case.policy == "by_rank":
        _take(found, case.name, case.leaf, reader, case.place.name)
    else:
        refused[case.leaf.blob] = case.name


def _compute(case: _Case, found: Assigned, reader: LeafReader) -> None:
    if case.leaf.name != case.leaf.blob or case.leaf.role in ("state", "subclass"):
        raise UsageError(
            f"blob {case.leaf.blob!r}: a reshard callable can make tensors and plain values, "
            f"not {case.name!r}; use one of {', '.join(RESHARD_POLICIES)}"
        )
    values = {node: _content(case, reader, node) for node in case.old_nodes}
    found.kept.add(case.name)
    found.computed[case.name] = case.policy(values, case.place)


def _content(case: _Case, reader: LeafReader, node: str) -> Any:
    """The value or tensor of one old node."""
    if case.leaf.kind == "value":
        return reader.value(case.name, node)
    spec = reader.spec(case.name, node)
    tensor = torch.empty(spec.shape, dtype=torch_dtype(by_name(str(spec.dtype))))
    reader.read_into(case.name, memory_of(tensor), node)
    return tensor


def _own_row(manifest: Manifest, rows: Sequence[int], node: str) -> int | None:
    number = manifest.world.number.get(node)
    for row in rows:
        if number is not None and number in manifest.nodes_of(manifest.leaves[row]):
            return row
    return None


def _take(found: Assigned, name: str, leaf: LeafRow, reader: LeafReader, node: str) -> None:
    found.rows[name] = leaf
    if leaf.kind == "value" and leaf.alias_of is None:
        known = node in reader.manifest.world.number
        found.values[name] = reader.value_json(name, node if known else None)


def _refusal(manifest: Manifest, nodes: Sequence[str], refused: Mapping[str, str]) -> str:
    blobs = ", ".join(repr(blob) for blob in sorted(refused))
    policies = ", ".join(map(repr, RESHARD_POLICIES[1:]))
    return (
        f"blob {blobs} has a value of its own on each of {len(manifest.world.nodes)} nodes, and now "
        f"there are {len(nodes)}: say what shall become of it with reshard={policies} or a callable "
        "where it is registered (the default 'error' refuses)"
    )
