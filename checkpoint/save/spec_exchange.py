"""How every process learns what leaves all nodes have, at the price of a digest per node.

Nodes with the same leaves form a class. Processes exchange digests of their nodes' leaves; only a
digest that was never seen before (at the first save, or when a class changes) is explained, by the
lowest process that has it. All processes know the same digests, so they agree on what to explain.

Digests are exchanged at every save, so a change on one node is seen by all. What follows from the same
digests of all nodes is the same, and is given back as the same objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.mesh import Mesh, placements_json, placements_of
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.planning.assignments import NodeClass, Plan, leaves_digest, same
from torchrelay.checkpoint.save.planning.plan import RepeatedPlans, shared_unlike, unusual
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import SaveFailedError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.session import Peers, warn
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Described:
    """A node's leaves and their scopes by name."""

    specs: tuple[LeafSpec, ...]
    scopes: Mapping[str, str]

    @cached_property
    def leaves_digest(self) -> str:
        """That of the leaves alone."""
        return leaves_digest(self.specs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything that a plan depends on: the leaves, and scopes but the usual one."""
        return canonical_json.sha256(canonical_json.dumps([self.leaves_digest, unusual(self.scopes)]))


_Members = dict[str, tuple[int, ...]]
"""Digest to the ranks of the nodes that have it."""
_Answer = tuple[_Members, dict[str, Described], tuple[NodeClass, ...], Mapping[str, str]]


class SpecExchange:
    """Remembers the classes and plans of earlier saves; one per engine."""

    def __init__(self) -> None:
        self.plans = RepeatedPlans()
        self._known: dict[str, Described] = {}
        self._mine: dict[int, Described] = {}
        self._last: _Answer | None = None
        self._agreed: str | None = None
        self._confirmed: str | None = None

    def confirmed(self, plan: Plan) -> bool:
        """Whether all processes, when they last told of their leaves, said to have agreed on this plan."""
        return plan.hash == self._confirmed

    def agree(self, plan: Plan) -> None:
        """All processes have compared this plan."""
        self._agreed = plan.hash

    def classes(
        self, peers: Peers, states: Sequence[NodeState], names: Sequence[object]
    ) -> tuple[tuple[NodeClass, ...], Mapping[str, str]]:
        """The classes of all nodes (`names` by rank), and the scope of every leaf by its name.

        Raises SaveFailedError, naming leaf and nodes, where replicas of a leaf are not alike.
        """
        self._mine = {state.rank: self._described(state) for state in states}
        # Counted from the process's own rank: processes that are alike then post the very same.
        told = [[rank - peers.rank, described.digest] for rank, described in self._mine.items()]
        answers = peers.exchange("save: leaves", [told, self._agreed])
        posted = [part for part, _ in answers]
        agreed = {hashed for _, hashed in answers}
        self._confirmed = self._agreed if len(agreed) == 1 else None
        by_rank = {process + rank: digest for process, part in enumerate(posted) for rank, digest in part}
        self._learn(peers, posted, {one.digest: one for one in self._mine.values()})
        members = _members(by_rank)
        self._known = {digest: self._known[digest] for digest in members}
        if self._last is None or self._last[0] != members or not self._same(self._last[1]):
            classes = tuple(_class(ranks, self._known[digest]) for digest, ranks in members.items())
            scopes = _merged_scopes(self._known[digest].scopes for digest in members)
            _check_alike(classes, scopes, names)
            if (unlike := shared_unlike(classes)) and peers.rank == 0:
                some = ", ".join(f"{name} with {other}" for name, other in list(unlike.items())[:3])
                warn(
                    f"some ranks share {some}, and others do not: a resume makes two tensors of it on all; "
                    "share it on all ranks, or on none",
                    stacklevel=2,
                )
            self._last = members, dict(self._known), classes, scopes
        return self._last[2], self._last[3]

    def _described(self, state: NodeState) -> Described:
        """A node's leaves and scopes; what is as it was stays the same object."""
        described = Described(state.specs, state.scopes)
        known = self._mine.get(state.rank)
        return known if known == described else described

    def _same(self, known: Mapping[str, Described]) -> bool:
        return known.keys() == self._known.keys() and all(known[one] is self._known[one] for one in known)

    def _learn(self, peers: Peers, posted: list[Any], mine: Mapping[str, Described]) -> None:
        first: dict[str, int] = {}
        for process, part in enumerate(posted):
            for _, digest in part:
                first.setdefault(digest, process)
        self._explain(peers, first, mine, everybody=all(posted))
        self._known.update(mine)  # of values, which are as long as they are now

    def _explain(
        self, peers: Peers, first: Mapping[str, int], mine: Mapping[str, Described], *, everybody: bool
    ) -> None:
        """Hear of classes that are new, from the lowest process that has each.

        One class alone is known to all where `everybody` has a node that is saved.
        """
        unknown = [digest for digest in first if digest not in self._known]
        if (len(first) == 1 and everybody) or not unknown:
            return
        told = [class_json(mine[digest]) for digest in unknown if first[digest] == peers.rank]
        for part in peers.exchange("save: classes", told):
            for one in part:
                self._known[one["digest"]] = class_of(one)


def _class(ranks: tuple[int, ...], described: Described) -> NodeClass:
    """With the digest of what was understood here, so that who understands otherwise has another plan."""
    return NodeClass.known(ranks, described.specs, described.leaves_digest)


def _members(by_rank: Mapping[int, str]) -> _Members:
    members: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        members.setdefault(by_rank[rank], []).append(rank)
    return {digest: tuple(ranks) for digest, ranks in members.items()}


def class_json(described: Described) -> dict[str, Any]:
    """A class as it travels: a mesh, whose nodes may be thousands, once for all leaves on it."""
    specs = described.specs
    meshes = {spec.sharding.digest: spec.sharding for spec in specs if spec.sharding is not None}
    number = {mesh: index for index, mesh in enumerate(meshes)}
    rows = [
        {
            **asdict(replace(spec, sharding=None)),
            "role": spec.role.value,
            "shape": list(spec.shape),
            "sharding": None if spec.sharding is None else number[spec.sharding.digest],
        }
        for spec in specs
    ]
    told = [_mesh_json(mesh) for mesh in meshes.values()]
    return {"digest": described.digest, "meshes": told, "specs": rows, "scopes": dict(described.scopes)}


def _mesh_json(mesh: Mesh) -> Any:
    return [list(mesh.nodes), list(mesh.extents), placements_json(mesh.placements), mesh.rule]


def _mesh(json: Any) -> Mesh:
    nodes, extents, placements, rule = json
    return Mesh(tuple(nodes), tuple(extents), placements_of(placements) or (), rule)


def class_of(one: Mapping[str, Any]) -> Described:
    """What `class_json` told."""
    meshes = [_mesh(json) for json in one["meshes"]]
    specs = tuple(
        LeafSpec(
            **{
                **row,
                "role": Role(row["role"]),
                "shape": tuple(row["shape"]),
                "order": None if row["order"] is None else tuple(row["order"]),
                "sharding": None if row["sharding"] is None else meshes[row["sharding"]],
            }
        )
        for row in one["specs"]
    )
    return Described(specs, one["scopes"])


def _merged_scopes(parts: Any) -> dict[str, str]:
    """The scope of each name; where one node says `rank`, it is `rank` for all."""
    merged: dict[str, str] = {}
    for part in parts:
        for name, scope in part.items():
            merged[name] = scope if merged.get(name, scope) == scope else Scope.RANK.value
    return merged


def _check_alike(classes: Sequence[NodeClass], scopes: Mapping[str, str], names: Sequence[object]) -> None:
    seen: dict[str, tuple[tuple[object, ...], int, LeafSpec]] = {}
    for node_class in classes if len(classes) > 1 else ():
        for leaf in node_class.leaves:
            if scopes[leaf.name] != Scope.REPLICATED.value:
                continue
            first = seen.setdefault(leaf.name, (same(leaf), node_class.nodes[0], leaf))
            if first[0] != same(leaf):
                one, other = _told(first[2], leaf), _told(leaf, first[2])
                raise SaveFailedError(
                    f"{leaf.name!r} is replicated, but it is {one} on {names[first[1]]} and {other} on "
                    f"{names[node_class.nodes[0]]}: make it alike on all ranks, or register blob "
                    f"{leaf.blob!r} with scope='rank'"
                )


def _told(leaf: LeafSpec, other: LeafSpec) -> str:
    """What a leaf is, as far as another one may be something else."""
    parts = [str(leaf)]
    if leaf.role is not other.role:
        parts.append(f"{leaf.role} of the {leaf.group} group")
    if leaf.alias_of != other.alias_of:
        parts.append(
            "a tensor of its own" if leaf.alias_of is None else f"the same tensor as {leaf.alias_of}"
        )
    if leaf.sharding != other.sharding:
        parts.append("whole" if leaf.sharding is None else "in shards")
    return ", ".join(parts)
