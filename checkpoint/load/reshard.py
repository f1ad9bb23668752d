"""Decide what each node loads from an epoch: what it owns, what all share, or what a policy makes of it.

A leaf has a set of nodes that own it, as the layout states. On the nodes of the epoch every node takes what
it owns and nothing else. On other nodes a leaf that all owned alike is loaded by all. For any other leaf the
`reshard` policy of its blob decides:

- "error" (default): raise.
- "drop": keep the program's value.
- "by_rank": nodes of the epoch load theirs, new ones keep the program's value.
- a callable `policy(values, place)`: makes a value from those of the owners.

Leaves that belong together (an optimizer, an object's state, a value with its tensors) are decided together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import by_name, memory_of, torch_dtype
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.state.checkpoint_set import SetMember
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP
from torchrelay.errors import FormatError, UsageError
from torchrelay.jobs.blobs import RESHARD_POLICIES
from torchrelay.jobs.cluster import NodePlace
from torchrelay.records import dataclass


@dataclass
class Assigned:
    """What one node loads: stored leaves, their values, and what stays unchanged."""

    rows: dict[str, LeafRow] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Leaves that keep the program's value."""
    offered: set[str] = field(default_factory=set)
    """Those of `rows` that are on a mesh of other nodes: objects may have them here or not."""
    may_lack: set[str] = field(default_factory=set)
    """Blobs of which this node may have leaves that the epoch lacks, by their policy."""
    random: list[str] = field(default_factory=list)
    gradients: dict[str, LeafRow] = field(default_factory=dict)
    lost_gradients: bool = False
    """Whether gradients of the open window belong to nodes that are absent here."""
    computed: dict[str, Any] = field(default_factory=dict)
    """Blobs that a policy made from those of all nodes."""
    nodes: dict[str, str] = field(default_factory=dict)
    """The node whose value is taken, by leaf: buffers, on a node that has none."""
    buffers: dict[str, str] = field(default_factory=dict)
    """Buffers that differed between the nodes of the epoch, and the first of these."""
    excluded: set[str] = field(default_factory=set)
    """Excluded leaves of other nodes, for which no policy is applied."""
    foreign: dict[str, str] = field(default_factory=dict)
    """Owners of leaves that only other nodes have."""

    def why_absent(self, name: str) -> str:
        """Why a leaf that an object here has is not loaded on this node; empty if the epoch lacks it."""
        if name not in self.foreign:
            return ""
        return (
            f"it belongs to {self.foreign[name]} alone: register the blob with reshard='by_rank' to keep "
            "the program's value here"
        )


def same_nodes(manifest: Manifest, nodes: Sequence[str]) -> bool:
    """Whether these are the nodes of the epoch, in any order."""
    return set(nodes) == set(manifest.world.nodes)


def blobs_of_absent_nodes(manifest: Manifest, nodes: Sequence[str]) -> set[str]:
    """Blobs with leaves that not all nodes shared, and with an owner that is absent from this job."""
    if same_nodes(manifest, nodes):
        return set()
    here = {number for name, number in manifest.world.number.items() if name in nodes}
    return {
        leaf.blob
        for leaf in manifest.leaves
        if leaf.role not in ("rng", "gradient")
        and not manifest.is_shared(leaf)
        and not manifest.owners_of(leaf) <= here
    }


def assign(
    manifest: Manifest,
    place: NodePlace,
    nodes: Sequence[str],
    members: Mapping[str, SetMember],
    reader: LeafReader,
    anywhere: frozenset[str] = frozenset(),
    without: Collection[str] = (),
    excluded: Callable[[str], bool] = lambda name: False,
) -> Assigned:
    """Decide for one node; raises UsageError that names every blob without a policy for these nodes.

    `place` and `nodes` use stored node names; `anywhere` are the blobs that some node has registered. Blobs
    in `without` are not loaded at all. Other nodes than those of the epoch skip what is wholly `excluded`.
    """
    choice = _Choice(manifest, place, tuple(nodes), members, reader, anywhere)
    found = choice.found
    here = same_nodes(manifest, nodes)
    wanted = ((n, rows) for n, rows in manifest.rows.items() if manifest.leaves[rows[0]].blob not in without)
    for name, rows in wanted:
        own = choice.own_row(rows)
        if manifest.leaves[rows[0]].role == "rng":
            found.random += [name] if own is not None else []
        elif manifest.leaves[rows[0]].role == "gradient":
            leaf = manifest.leaves[rows[0] if own is None else own]
            # Each node of the epoch takes its own, others one that all had alike, or none.
            if own is not None if here else manifest.is_shared(leaf):
                found.gradients[name] = leaf
                choice.take_value(leaf)
            elif not here:
                found.lost_gradients = True
        elif here and own is not None:
            choice.take(manifest.leaves[own])
        elif here:
            choice.leave(name)
    if not here:
        units = list(_units(manifest, without))
        found.excluded.update(name for unit in units if all(map(excluded, unit)) for name in unit)
        for unit in units:
            if unit[0] not in found.excluded:
                choice.decide(unit)
    if choice.refused:
        raise UsageError(_refusal(manifest, nodes, choice.refused, anywhere))
    if found.lost_gradients:
        found.gradients.clear()
    return found


def assign_replicated(
    manifest: Manifest,
    place: NodePlace,
    members: Mapping[str, SetMember],
    reader: LeafReader,
    without: Collection[str] = (),
) -> Assigned:
    """Decide for a node that is not saved: it loads replicated leaves, all else stays unchanged."""
    choice = _Choice(manifest, place, (), members, reader, frozenset())
    for unit in _units(manifest, without):
        choice.take_replicated(unit)
    choice.found.may_lack.update(members)
    return choice.found


def _units(manifest: Manifest, without: Collection[str]) -> Iterator[list[str]]:
    """Groups of leaf names that belong together, but those of blobs `without`."""
    first = {name: manifest.leaves[rows[0]] for name, rows in manifest.rows.items()}
    trees = {name for name, leaf in first.items() if leaf.kind == "value"}
    found: dict[str, list[str]] = {}
    for name, leaf in first.items():
        if leaf.role in OF_POSITION or leaf.blob in without:
            continue
        unit, above = name, name
        while above and leaf.group != OPTIM_GROUP:
            unit = above if above in trees and first[above].blob == leaf.blob else unit
            above = above.rpartition(".")[0]
        found.setdefault(leaf.blob if leaf.group == OPTIM_GROUP else unit, []).append(name)
    yield from found.values()


@dataclass
class _Choice:
    """Builds the assignment of one node; see `assign`."""

    manifest: Manifest
    place: NodePlace
    nodes: tuple[str, ...]
    members: Mapping[str, SetMember]
    reader: LeafReader
    anywhere: frozenset[str]
    found: Assigned = field(default_factory=Assigned)
    refused: dict[str, str] = field(default_factory=dict)
    """One leaf of each blob."""

    def own_row(self, rows: Sequence[int]) -> int | None:
        number = self.manifest.world.number.get(self.place.name)
        for row in rows:
            if number is not None and number in self.manifest.owners_of(self.manifest.leaves[row]):
                return row
        return None

    def take(self, leaf: LeafRow) -> None:
        self.found.rows[leaf.name] = leaf
        self.take_value(leaf)

    def take_value(self, leaf: LeafRow) -> None:
        if leaf.kind == "value" and leaf.alias_of is None:
            known = self.place.name in self.manifest.world.number
            value = self.reader.value_json(leaf.name, self.place.name if known else None)
            self.found.values[leaf.name] = value

    def leave(self, name: str) -> None:
        """Leave a leaf to its owners, which are nodes of this job. An object here may have it too."""
        leaf = self._first(name)
        if leaf.scope == "sharded":
            self.found.offered.add(name)
            self.take(leaf)
            return
        member = self.members.get(leaf.blob)
        policy = member.reshard if member is not None else None
        if policy in ("drop", "by_rank"):
            self.found.kept.add(name)
        elif callable(policy):
            self._compute(leaf, policy)
        else:
            whose = ", ".join(self._owners(name))
            self.found.foreign[name] = whose
            self.found.foreign.setdefault(leaf.blob, whose)

    def take_replicated(self, unit: Sequence[str]) -> None:
        """Take leaves that belong together if all nodes of the epoch had equal content."""
        leaves = [self._first(name) for name in unit]
        member = self.members.get(leaves[0].blob)
        alike = all(leaf.scope == "replicated" and self.manifest.is_shared(leaf) for leaf in leaves)
        registered = member is not None and member.registered
        if registered and alike:
            for leaf in leaves:
                self.take(leaf)
        elif registered and self._only_buffers_differ(leaves):
            self._take_own_or_first(leaves)
        else:
            self.found.kept.update(unit)

    def decide(self, unit: Sequence[str]) -> None:
        """Decide on leaves that belong together, if the nodes differ from those of the epoch."""
        leaves = list(map(self._first, unit))
        if all(map(self.manifest.is_shared, leaves)):
            for leaf in leaves:
                self.take(leaf)
            return
        own = {name: self.own_row(self.manifest.rows[name]) for name in unit}
        member = self.members.get(leaves[0].blob)
        if member is None or not member.registered:
            # Leave what `init` made to its owners, if all are here; what others register, they decide.
            blob, made = self._first(next(iter(own))).blob, self.manifest.facts.made_by_init
            if blob in self.anywhere and made is not None and blob not in made:
                return
            owners = {node for name in own for node in self._owners(name)}
            if owners <= set(self.nodes) and len(owners) < len(self.manifest.world.nodes):
                self._take_own(own)
            elif blob not in self.anywhere:
                self._refuse(list(own))
        elif callable(member.reshard):
            for leaf in leaves:
                self._compute(leaf, member.reshard)
        elif member.reshard in ("drop", "by_rank"):
            self.found.may_lack.add(leaves[0].blob)
            self._take_own(own if member.reshard == "by_rank" else dict.fromkeys(own))
        elif member.reshard is None and member.scope is None and self._only_buffers_differ(leaves):
            self._take_own_or_first(leaves)
        elif any(leaf.scope != "host" for leaf in leaves) or None in own.values():
            self._refuse(unit)
        else:
            self._take_own(own)

    def _take_own(self, own: Mapping[str, int | None]) -> None:
        for name, row in own.items():
            if row is None:
                self.found.kept.add(name)
            else:
                self.take(self.manifest.leaves[row])

    def _only_buffers_differ(self, leaves: Sequence[LeafRow]) -> bool:
        """Whether only buffers that all nodes have differ: statistics of the batches of each."""
        everybody = len(self.manifest.world.nodes)
        return all(
            self.manifest.is_shared(leaf)
            or (self._is_buffer(leaf) and len(self._owners(leaf.name)) == everybody)
            for leaf in leaves
        )

    def _is_buffer(self, leaf: LeafRow) -> bool:
        """Whether a leaf is a buffer of a module, or a copy: its name ends alike and the form is equal."""
        ends = leaf.name.split(".")
        return leaf.role == "buffer" or any(
            (".".join(ends[at:]), leaf.dtype, leaf.shape) in self._buffers for at in range(1, len(ends))
        )

    @cached_property
    def _buffers(self) -> set[tuple[str, str | None, tuple[int, ...]]]:
        buffers = [leaf for leaf in self.manifest.leaves if leaf.role == "buffer"]
        return {(leaf.name[len(leaf.blob) + 1 :], leaf.dtype, leaf.shape) for leaf in buffers}

    def _take_own_or_first(self, leaves: Sequence[LeafRow]) -> None:
        for leaf in leaves:
            own = self.own_row(self.manifest.rows[leaf.name])
            if not self.manifest.is_shared(leaf):
                first = self.found.buffers[leaf.name] = self._owners(leaf.name)[0]
                if own is None:
                    self.found.nodes[leaf.alias_of or leaf.name] = first
            self.take(leaf if own is None else self.manifest.leaves[own])

    def _compute(self, leaf: LeafRow, policy: Any) -> None:
        """Have the policy make a leaf from the values of its owners."""
        if leaf.name != leaf.blob or leaf.role in ("state", "subclass"):
            raise UsageError(
                f"blob {leaf.blob!r}: a reshard callable can make tensors and plain values, not "
                f"{leaf.name!r}; use one of {', '.join(RESHARD_POLICIES)}"
            )
        try:
            values = {node: self._content(leaf, node) for node in self._owners(leaf.name)}
        except FormatError as error:
            raise UsageError(
                f"blob {leaf.blob!r}: a reshard callable can make tensors and plain values, and this has "
                f"tensors or dataclass instances inside; use one of {', '.join(RESHARD_POLICIES)}"
            ) from error
        self.found.kept.add(leaf.name)
        self.found.computed[leaf.name] = policy(values, self.place)

    def _content(self, leaf: LeafRow, node: str) -> Any:
        """The value or tensor of one node of the epoch."""
        if leaf.kind == "value":
            return self.reader.value(leaf.name, node)
        spec = self.reader.spec(leaf.name, node)
        tensor = torch.empty(spec.shape, dtype=torch_dtype(by_name(str(spec.dtype))))
        self.reader.read_into(leaf.name, memory_of(tensor), node)
        return tensor

    def _owners(self, name: str) -> list[str]:
        return owner_names(self.manifest, name)

    def _refuse(self, unit: Sequence[str]) -> None:
        shared = (name for name in unit if not self.manifest.is_shared(self._first(name)))
        name = next(shared, unit[0])
        self.refused.setdefault(self._first(name).blob, name)

    def _first(self, name: str) -> LeafRow:
        return self.manifest.leaves[self.manifest.rows[name][0]]


def owner_names(manifest: Manifest, name: str) -> list[str]:
    """Names of the nodes that own a leaf, in the order of their ranks."""
    found = {node for row in manifest.rows[name] for node in manifest.owners_of(manifest.leaves[row])}
    return [manifest.world.nodes[node] for node in sorted(found)]


def _refusal(
    manifest: Manifest, nodes: Sequence[str], refused: Mapping[str, str], anywhere: Collection[str]
) -> str:
    lines, nowhere = [], sorted(refused.keys() - anywhere)
    leave = f"; if no node registers it, leave it out: resume_exclude={nowhere}" if nowhere else ""
    for blob, leaf in sorted(refused.items()):
        owners = owner_names(manifest, leaf)
        some = ", ".join(owners[:4]) + (f", ... ({len(owners)} nodes)" if owners[4:] else "")
        lines.append(f"{blob!r} ({'it' if leaf == blob else leaf} belongs to {some})")
    return (
        f"the epoch was saved by {len(manifest.world.nodes)} nodes, and now there are {len(nodes)}, "
        f"{', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''}. Not all nodes share blob "
        f"{', '.join(lines)}: register it with a policy, such as reshard='by_rank': nodes load their own, "
        f"new ones keep the program's value{leave}"
    )
