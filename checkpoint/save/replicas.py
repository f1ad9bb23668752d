"""Before an epoch is committed: are the replicas alike, and what follows where they are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import describe
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.pipeline import SaveJob
from torchrelay.checkpoint.save.planning.replica_check import (
    WHOLE_EVERY,
    Lone,
    Mode,
    Verdict,
    compare_replicas,
    digests_of,
    fails_when_different,
    is_compared,
    mode_at,
)
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role, Value, local_of
from torchrelay.errors import SaveFailedError, UsageError
from torchrelay.jobs.data.data_parallel import broadcast_buffers
from torchrelay.jobs.session import Peers, together
from torchrelay.records import dataclass


def checked_every(epochs: int | None) -> int:
    """The epochs between comparisons of all bytes; raises UsageError."""
    if epochs is None:
        return WHOLE_EVERY
    if type(epochs) is int and epochs >= 1:
        return epochs
    raise UsageError(f"compare_every is {epochs!r:.80}; it is a whole number of epochs from 1")


def all_listed(peers: Peers, topic: str, failed: Exception | None) -> None:
    """Raise on all processes what kept one from listing its leaves."""
    together(peers, topic, lambda: _check(failed))


def _check(failed: Exception | None) -> None:
    if failed is not None:
        raise failed


class ReplicaCheck:
    """Compares replicas save after save, whole every `every` epochs; knows which modules DDP keeps alike."""

    def __init__(self, every: int = WHOLE_EVERY) -> None:
        self._every = every
        self._first = True
        """Nothing was found alike yet."""
        self._owed = False
        """A comparison of all bytes was due and not made, because the save had failed before."""
        self._broadcast = BroadcastBuffers()

    def run(
        self,
        job: SaveJob,
        forced: frozenset[str],
        *,
        failed: Exception | None = None,
    ) -> tuple[frozenset[str], WholeBytes | None]:
        """Return the leaves that are `rank` from now on, because they differ, and what is left to compare.

        `forced` are blobs whose scope `replicated` the user fixed. Of parameters and optimizer state samples
        are compared now; where all their bytes are due on any process, these are left for before the commit,
        but for parts that two meshes of the same form hold alone. Raises SaveFailedError, naming leaves and
        nodes, where a difference must not be; on all processes what `failed` on one, which has no leaves to
        tell of.
        """
        if len(job.places) == 1:
            all_listed(job.peers, "save: boundary", failed)
            return frozenset(), None
        mode = mode_at(job.position.epoch, first=self._first or self._owed, every=self._every)
        self._owed = mode is Mode.WHOLE
        shards = {state.rank: _parts(state) for state in job.states}
        strict = {
            leaf.name
            for state in job.states
            for leaf in state.leaves.values()
            if fails_when_different(leaf, forced)
        }
        strict.update(leaf.name for groups in shards.values() for group in groups for leaf in group.leaves)

        def digests() -> dict[int, list[dict[str, str]]]:
            _check(failed)
            return self._samples(job, shards)

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
        self._owed = verdict.due
        if verdict.failures:
            names = {place.rank: str(place) for place in job.places}
            raise SaveFailedError(_told(job.position, names, verdict.failures))
        return verdict.demote, self._whole_bytes(job, shards) if verdict.due else None

    def _samples(
        self, job: SaveJob, shards: Mapping[int, Sequence[Parts]]
    ) -> dict[int, list[dict[str, str]]]:
        return {
            state.rank: [
                digests_of(leaves, Mode.SAMPLES)
                for leaves in (
                    self._compared(state),
                    *(group.leaves for group in shards[state.rank] if not group.lone),
                )
            ]
            for state in job.states
        }

    def _whole_bytes(self, job: SaveJob, shards: Mapping[int, Sequence[Parts]]) -> WholeBytes:
        groups = {
            state.rank: [
                [leaf for leaf in self._compared(state) if fails_when_different(leaf)],
                *(group.leaves for group in shards[state.rank] if not group.lone),
            ]
            for state in job.states
        }
        return WholeBytes(job, groups, self._compared_whole)

    def _compared_whole(self, alike: bool) -> None:
        self._owed = False
        self._first = self._first and not alike

    def _compared(self, state: NodeState) -> list[Leaf]:
        broadcast = self._broadcast.among(state)
        return [
            leaf for leaf in state.leaves.values() if is_compared(leaf, state.scopes[leaf.name], broadcast)
        ]


class BroadcastBuffers:
    """Which leaves are buffers that DDP sends around, found by their memory, whatever they are registered in.

    To look for living DDP objects walks the heap. That is done when other objects are saved than before,
    and when replicas differ: a module may be wrapped later.
    """

    def __init__(self) -> None:
        self._known: dict[int, frozenset[str]] = {}
        self._modules: dict[int, list[weakref.ref[nn.Module]]] = {}

    def among(self, state: NodeState) -> frozenset[str]:
        """The names of these leaves, of a node that is about to be compared."""
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

    def agree(self, job: SaveJob, verdict: Verdict) -> Verdict:
        """The verdict without what DDP sends around on any process, which differs by design."""
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
    """Where a tensor lies, and as what."""
    return (content.data_ptr(), content.shape) if isinstance(content, torch.Tensor) else None


@dataclass(frozen=True)
class Parts:
    """A node's parts of leaves on meshes of one sort; `lone` where no other place of its mesh holds them."""

    leaves: tuple[Leaf, ...]
    lone: bool


class WholeBytes:
    """All bytes of the replicas' parameters and optimizer state, which are compared before the commit.

    They are hashed while the shards are written. Of a save behind the training, before that: what may be
    written before the gate opens at the boundary, the rest before it opens. `groups` are, by node, leaves
    that are compared together; `compared` hears whether all were alike.
    """

    def __init__(
        self, job: SaveJob, groups: Mapping[int, Sequence[Sequence[Leaf]]], compared: Callable[[bool], None]
    ) -> None:
        self._told = partial(_told, job.position, {place.rank: str(place) for place in job.places})
        self._left = {
            node: [{leaf.name: leaf for leaf in group} for group in some] for node, some in groups.items()
        }
        self._digests: dict[int, list[dict[str, str]]] = {
            node: [{} for _ in some] for node, some in groups.items()
        }
        self._names = {leaf.name for some in groups.values() for group in some for leaf in group}
        self._compared = compared

    def hash_but(self, guarded: Mapping[int, Collection[int]]) -> None:
        """Hash what does not lie at one of these addresses, by node."""
        for node, groups in self._left.items():
            later = guarded.get(node, ())
            for group, digests in zip(groups, self._digests[node], strict=True):
                for leaf in [leaf for leaf in group.values() if _address(leaf) not in later]:
                    _hash_one(leaf.name, group, digests)

    def hash_rest(self) -> None:
        """Hash what is left, and let go of it."""
        for hash_one in self.each_left():
            hash_one()

    def each_left(self) -> Iterator[Callable[[], None]]:
        """What `hash_rest` does, leaf by leaf; each may be called by another thread, and is left if it fails.

        Samples of every leaf were copied before by who saves, behind whatever was queued on its device.
        """
        for node, groups in self._left.items():
            for group, digests in zip(groups, self._digests[node], strict=True):
                for name in tuple(group):
                    yield partial(_hash_one, name, group, digests)

    def compare(self, peers: Peers, failed: Exception | None = None) -> None:
        """Raise SaveFailedError, naming leaves and nodes, on all processes alike; `failed` is told to all."""

        def hashed() -> Mapping[int, Sequence[Mapping[str, str]]]:
            if failed is not None:
                raise failed
            self.hash_rest()  # nothing is, unless an error came between
            return self._digests

        verdict = compare_replicas(peers, "save: all bytes of replicas", hashed, self._names)
        self._compared(not verdict.failures)
        if verdict.failures:
            raise SaveFailedError(self._told(verdict.failures))


def _hash_one(name: str, left: dict[str, Leaf], digests: dict[str, str]) -> None:
    digests.update(digests_of([left[name]], Mode.WHOLE))
    del left[name]


def _address(leaf: Leaf) -> int:
    return 0 if isinstance(leaf.content, Value) else leaf.content.data_ptr()


def _parts(state: NodeState) -> list[Parts]:
    """A node's parts of leaves on meshes: first those that others hold too."""
    shared = shared_parts(state.leaves, state.specs, state.rank)
    return [*shared, *lone_parts(state.leaves, state.specs, state.rank)]


def shared_parts(leaves: Mapping[str, Leaf], specs: Sequence[LeafSpec], node: int) -> list[Parts]:
    """A node's parts that other places of the mesh hold too, named by their first box, a group per mesh."""
    found: dict[object, list[Leaf]] = {}
    for spec, mesh in _placed(specs, node):
        first = tuple(side[0] for side in mesh.local_intervals(spec.shape, node) if side)
        if mesh.replicas > 1 and len(first) == len(spec.shape):
            part = _part(leaves[spec.name], f"{spec.name} {describe(first)}")
            found.setdefault((mesh.extents, mesh.placements), []).append(part)
    return [Parts(tuple(group), lone=False) for group in found.values()]


def lone_parts(leaves: Mapping[str, Leaf], specs: Sequence[LeafSpec], node: int) -> list[Parts]:
    """A node's parts that no other place of its mesh holds, named by their place, a group per blob and mesh.

    The same leaf may lie on other sub-meshes of the same form: then its parts there have these names.
    """
    found: dict[object, list[Leaf]] = {}
    for spec, mesh in _placed(specs, node):
        if mesh.replicas == 1:
            place = f"{spec.name} (place {mesh.place[node]} of {list(mesh.extents)})"
            key = (spec.blob, mesh.extents, mesh.placements)
            found.setdefault(key, []).append(_part(leaves[spec.name], place))
    return [Parts(tuple(group), lone=True) for group in found.values()]


def _placed(specs: Sequence[LeafSpec], node: int) -> Iterator[tuple[LeafSpec, Mesh]]:
    for spec in specs:
        if spec.sharding is not None and spec.alias_of is None and node in spec.sharding.place:
            yield spec, spec.sharding


def _part(leaf: Leaf, name: str) -> Leaf:
    if isinstance(leaf.content, Value):
        return leaf
    return replace(leaf, name=name, content=local_of(leaf.content))


def _told(position: Position, names: Mapping[int, str], failures: Mapping[str, tuple[int, ...]]) -> str:
    parts = [
        f"{leaf} differs on {', '.join(names[node] for node in nodes)}" for leaf, nodes in failures.items()
    ]
    more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return (
        f"epoch {position}: replicas are not alike: {'; '.join(parts[:5])}{more}. "
        "Parameters and optimizer state must be the same on all ranks (wrap the module with "
        "torchrelay.data_parallel, build it after torchrelay.seed); register what may "
        "differ with scope='rank'"
    )
