"""Have all processes agree on the leaves of an epoch before it is written, and compare replicas.

Nodes with the same leaves form a class. Processes exchange digests of their nodes' leaves at every save, so
each sees a change on any node. The specs of a digest that is new (at the first save, or when a class changes)
are sent by the lowest process that has it. Equal digests of all nodes give the same objects again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.mesh import Mesh, placements_json, placements_of
from torchrelay.checkpoint.format.names import Recent
from torchrelay.checkpoint.save.assignments import NodeClass, SavePlan, leaves_digest, same
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.plan import plan_classes, shared_unlike, unusual
from torchrelay.checkpoint.save.replicas import (
    Lone,
    MeshParts,
    Mode,
    ReplicaVerdict,
    WholeBytes,
    compare_replicas,
    differences_message,
    digests_of,
    fails_when_different,
    is_compared,
    mode_at,
    parts_of_node,
)
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role
from torchrelay.errors import SaveFailedError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.data.data_parallel import broadcast_buffers
from torchrelay.jobs.session import Peers, together, warn
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.pipeline import SaveJob


_REMEMBERED = 4
"""Number of cached plans: a save that references older bytes asks twice."""


_Made = tuple[tuple[NodeClass, ...], Mapping[str, str], tuple[int, ...], frozenset[str], SavePlan]
"""A plan after its arguments."""


@dataclass(frozen=True)
class Described:
    """A node's leaves and their scopes by name."""

    specs: tuple[LeafSpec, ...]
    scopes: Mapping[str, str]

    @cached_property
    def leaves_digest(self) -> str:
        """Digest of the leaves, without scopes."""
        return leaves_digest(self.specs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything that a plan depends on: the leaves, and scopes except the default."""
        return canonical_json.sha256(canonical_json.dumps([self.leaves_digest, unusual(self.scopes)]))


_Answer = tuple[dict[str, tuple[int, ...]], dict[str, Described], tuple[NodeClass, ...], Mapping[str, str]]


class SpecExchange:
    """Caches the classes and plans of earlier saves; one per engine."""

    def __init__(self) -> None:
        self._plans: Recent[_Made] = Recent(_REMEMBERED)
        self._known: dict[str, Described] = {}
        self._mine: dict[int, Described] = {}
        self._last: _Answer | None = None
        self.agreed: str | None = None
        """Hash of the last plan that all processes have compared."""
        self.confirmed: str | None = None
        """The same, if all of them stated it in the last exchange."""

    def plan(
        self,
        classes: tuple[NodeClass, ...],
        scopes: Mapping[str, str],
        hosts: tuple[int, ...],
        referenced: frozenset[str] = frozenset(),
    ) -> SavePlan:
        """The plan of `plan_classes`; of the last few, known by the identity of classes and scopes."""

        def fits(made: _Made) -> bool:
            return made[0] is classes and made[1] is scopes and made[2:4] == (hosts, referenced)

        def make() -> _Made:
            plan = plan_classes(classes, scopes=scopes, hosts=hosts, referenced=referenced)
            return classes, scopes, hosts, referenced, plan

        return self._plans.get(fits, make)[-1]

    def classes(
        self, peers: Peers, states: Sequence[NodeState], names: Sequence[object]
    ) -> tuple[tuple[NodeClass, ...], Mapping[str, str]]:
        """The classes of all nodes (`names` by rank), and the scope of every leaf by its name.

        Raises SaveFailedError, naming leaf and nodes, if replicas of a leaf differ in form.
        """
        self._mine = {state.rank: self._described(state) for state in states}
        # Counted from the process's own rank: processes with equal leaves then send equal messages.
        digests = [[rank - peers.rank, described.digest] for rank, described in self._mine.items()]
        answers = peers.exchange("save: leaves", [digests, self.agreed])
        posted = [part for part, _ in answers]
        agreed = {hashed for _, hashed in answers}
        self.confirmed = self.agreed if len(agreed) == 1 else None
        by_rank = {process + rank: digest for process, part in enumerate(posted) for rank, digest in part}
        self._learn(peers, posted)
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_of.setdefault(by_rank[rank], []).append(rank)
        members = {digest: tuple(ranks) for digest, ranks in ranks_of.items()}
        self._known = {digest: self._known[digest] for digest in members}
        if self._last is None or self._last[0] != members or not self._same(self._last[1]):
            # With the digest of the received leaves, so that a misread class gives another plan.
            described = [(ranks, self._known[digest]) for digest, ranks in members.items()]
            classes = tuple(NodeClass.known(ranks, one.specs, one.leaves_digest) for ranks, one in described)
            scopes: dict[str, str] = {}
            for digest in members:
                for name, scope in self._known[digest].scopes.items():  # `rank` on one node is `rank` for all
                    scopes[name] = scope if scopes.get(name, scope) == scope else Scope.RANK.value
            _check_alike(classes, scopes, names)
            if (unlike := shared_unlike(classes)) and peers.rank == 0:
                some = ", ".join(f"{name} with {other}" for name, other in list(unlike.items())[:3])
                warn(
                    f"some ranks share {some}, and others do not: share it on all ranks or on none, "
                    "because a resume makes two tensors of it on all",
                    stacklevel=2,
                )
            self._last = members, dict(self._known), classes, scopes
        return self._last[2], self._last[3]

    def _described(self, state: NodeState) -> Described:
        """A node's leaves and scopes; the same object if unchanged."""
        described = Described(state.specs, state.scopes)
        known = self._mine.get(state.rank)
        return known if known == described else described

    def _same(self, known: Mapping[str, Described]) -> bool:
        return known.keys() == self._known.keys() and all(known[one] is self._known[one] for one in known)

    def _learn(self, peers: Peers, posted: list[Any]) -> None:
        """Receive the specs of new classes, each from the lowest process that has it.

        Nothing is sent if there is one class and every process has a node that is saved.
        """
        mine = {one.digest: one for one in self._mine.values()}
        first: dict[str, int] = {}
        for process, part in enumerate(posted):
            for _, digest in part:
                first.setdefault(digest, process)
        unknown = [digest for digest in first if digest not in self._known]
        if unknown and not (len(first) == 1 and all(posted)):
            own = [class_json(mine[digest]) for digest in unknown if first[digest] == peers.rank]
            for part in peers.exchange("save: classes", own):
                self._known.update((one["digest"], class_of(one)) for one in part)
        self._known.update(mine)  # of values, with their current length


def class_json(described: Described) -> dict[str, Any]:
    """A class as JSON, with each mesh once for all leaves on it."""
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
    listed = [
        [list(mesh.nodes), list(mesh.extents), placements_json(mesh.placements), mesh.rule]
        for mesh in meshes.values()
    ]
    return {"digest": described.digest, "meshes": listed, "specs": rows, "scopes": dict(described.scopes)}


def class_of(one: Mapping[str, Any]) -> Described:
    """The leaves and scopes in the JSON of `class_json`."""
    meshes = [
        Mesh(tuple(nodes), tuple(extents), placements_of(placements) or (), rule)
        for nodes, extents, placements, rule in one["meshes"]
    ]
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


def _check_alike(classes: Sequence[NodeClass], scopes: Mapping[str, str], names: Sequence[object]) -> None:
    seen: dict[str, tuple[tuple[object, ...], int, LeafSpec]] = {}
    for node_class in classes if len(classes) > 1 else ():
        for leaf in node_class.leaves:
            if scopes[leaf.name] != Scope.REPLICATED.value:
                continue
            first = seen.setdefault(leaf.name, (same(leaf), node_class.nodes[0], leaf))
            if first[0] != same(leaf):
                one, other = _distinguished(first[2], leaf), _distinguished(leaf, first[2])
                raise SaveFailedError(
                    f"{leaf.name!r} is replicated, but it is {one} on {names[first[1]]} and {other} on "
                    f"{names[node_class.nodes[0]]}: make it equal on all ranks"
                )


def _distinguished(leaf: LeafSpec, other: LeafSpec) -> str:
    """Describe a leaf by what distinguishes it from another one."""
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


def _check(failed: Exception | None) -> None:
    if failed is not None:
        raise failed


class ReplicaCheck:
    """Compares replicas at every save, fully every `every` epochs; caches which buffers DDP broadcasts."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._first = True
        """Nothing was found equal yet."""
        self._pending = False
        """A full comparison was due but not made, because the save had failed before."""
        self._broadcast = BroadcastBuffers()

    def run(
        self, job: SaveJob, forced: frozenset[str], *, failed: Exception | None = None
    ) -> tuple[frozenset[str], WholeBytes | None]:
        """Compare replicas across ranks; returns the leaves to demote to scope `rank`, and a full comparison.

        Parameters and optimizer state are compared by samples here. If a full comparison is due on any
        process, the returned object makes it before the commit; parts that only two meshes of the same form
        hold are compared here. `forced` are blobs whose scope the user fixed as `replicated`; `failed` is an
        error of this process.

        Raises SaveFailedError on all processes: for `failed` of one, and, with leaf and node names, for
        replicas that must be equal and are not.
        """
        if len(job.places) == 1:
            together(job.peers, "save: boundary", lambda: _check(failed))
            return frozenset(), None
        mode = mode_at(job.position.epoch, first=self._first or self._pending, every=self._every)
        self._pending = mode is Mode.WHOLE
        shards = {state.rank: parts_of_node(state) for state in job.states}
        strict = {
            leaf.name
            for state in job.states
            for leaf in state.leaves.values()
            if fails_when_different(leaf, forced)
        }
        strict.update(leaf.name for groups in shards.values() for group in groups for leaf in group.leaves)

        def digests() -> dict[int, list[dict[str, str]]]:
            _check(failed)
            found = {}
            for state in job.states:
                held = [group.leaves for group in shards[state.rank] if not group.lone]
                parts = [self._compared(state), *held]
                found[state.rank] = [digests_of(leaves, Mode.SAMPLES) for leaves in parts]
            return found

        verdict = compare_replicas(
            job.peers,
            "save: replicas",
            digests,
            strict,
            lone={
                rank: [
                    Lone(tuple(leaf.name for leaf in group.leaves), partial(digests_of, group.leaves))
                    for group in groups
                    if group.lone
                ]
                for rank, groups in shards.items()
            },
            due=mode is Mode.WHOLE,
        )
        verdict = self._broadcast.agree(job, verdict)
        self._pending = verdict.due
        if verdict.failures:
            names = {place.rank: str(place) for place in job.places}
            raise SaveFailedError(differences_message(job.position, names, verdict.failures))
        return verdict.demote, self._whole_bytes(job, shards) if verdict.due else None

    def _whole_bytes(self, job: SaveJob, shards: Mapping[int, Sequence[MeshParts]]) -> WholeBytes:
        groups = {
            state.rank: [
                [leaf for leaf in self._compared(state) if fails_when_different(leaf)],
                *(group.leaves for group in shards[state.rank] if not group.lone),
            ]
            for state in job.states
        }

        def compared(alike: bool) -> None:
            self._pending = False
            self._first = self._first and not alike

        return WholeBytes(job, groups, compared)

    def _compared(self, state: NodeState) -> list[Leaf]:
        broadcast = self._broadcast.among(state)
        return [
            leaf for leaf in state.leaves.values() if is_compared(leaf, state.scopes[leaf.name], broadcast)
        ]


class BroadcastBuffers:
    """Finds buffers that DDP broadcasts, by their memory, in any registered object.

    A search for living DDP objects walks the heap. It is made when other objects are saved than before, and
    when replicas differ, because a module may be wrapped later.
    """

    def __init__(self) -> None:
        self._known: dict[int, frozenset[str]] = {}
        self._modules: dict[int, list[weakref.ref[nn.Module]]] = {}

    def among(self, state: NodeState) -> frozenset[str]:
        """The names of these buffers among the leaves of a node, cached."""
        modules = [one for one in state.objects.values() if isinstance(one, nn.Module)]
        before = [ref() for ref in self._modules.get(state.rank, ())]
        if len(before) != len(modules) or any(a is not b for a, b in zip(before, modules, strict=True)):
            self._modules[state.rank] = [weakref.ref(one) for one in modules]
            self._known[state.rank] = self.found([state])
        return self._known.get(state.rank, frozenset())

    def found(self, states: Iterable[NodeState]) -> frozenset[str]:
        """The names of all such leaves now."""
        buffers = [leaf for state in states for leaf in state.leaves.values() if leaf.role is Role.BUFFER]
        sent = {_memory(buffer) for buffer in broadcast_buffers()} if buffers else set()
        return frozenset(leaf.name for leaf in buffers if _memory(leaf.content) in sent)

    def agree(self, job: SaveJob, verdict: ReplicaVerdict) -> ReplicaVerdict:
        """The verdict without buffers that DDP broadcasts on any process, which differ by design."""
        different = verdict.demote.union(verdict.failures)
        if not different:
            return verdict
        here = sorted(different & self.found(job.states))
        answers = job.peers.exchange("save: buffers of DDP", here)
        sent = frozenset(name for answer in answers for name in answer)
        self._known = {node: names | sent for node, names in self._known.items()}
        return replace(
            verdict,
            demote=verdict.demote - sent,
            failures={name: nodes for name, nodes in verdict.failures.items() if name not in sent},
        )


def _memory(content: Any) -> tuple[int, torch.Size] | None:
    return (content.data_ptr(), content.shape) if isinstance(content, torch.Tensor) else None
