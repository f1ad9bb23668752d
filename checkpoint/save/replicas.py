"""Compare replicas: which leaves, when, by samples or fully, and the result of a difference.

| leaves | compared | a difference | |---|---|---| | parameters, optimizer tensors | fully at a process's
first save and every `every` epochs, else samples | fails the save | | module buffers that DDP broadcasts |
never | is expected | | other replicated tensors, values, owners of aliases | at every save | demotes to
`rank`, or fails if forced | | `rank` and `host` leaves | never | is expected |

Digests are xxh3-128 of the stored bytes. A combined digest per node and mesh is exchanged, and details only
where these differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch
import xxhash

from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import describe
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.change_detection import stretches
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Value, local_of
from torchrelay.errors import SaveFailedError, UsageError
from torchrelay.jobs.session import Peers, together
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.pipeline import SaveJob


WHOLE_EVERY = 10
"""Default number of epochs between full comparisons of parameters and optimizer state."""
_SAME_BY_CONSTRUCTION = ("parameter", "optimizer")

ByLeaf = Mapping[str, str]
"""Digest (hex) by leaf name."""


class Mode(Enum):
    """How much of the parameters and optimizer tensors is compared."""

    WHOLE = "whole"
    SAMPLES = "samples"


@dataclass(frozen=True)
class ReplicaVerdict:
    """Result of a comparison.

    `demote` are leaves that become `rank` for good. `failures` lists, per leaf, the nodes whose bytes differ
    from most; any of them fails the save. `due`: some process requests a full comparison.
    """

    demote: frozenset[str] = frozenset()
    failures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    due: bool = False


def mode_at(epoch: int, *, first: bool, every: int = WHOLE_EVERY) -> Mode:
    """Full at the first save of a process (so also after a restart) and every `every` epochs."""
    return Mode.WHOLE if first or epoch % every == 0 else Mode.SAMPLES


def is_compared(leaf: Leaf | LeafSpec, scope: str, broadcast: Collection[str] = ()) -> bool:
    """Whether a leaf is compared at all; `broadcast` names the buffers that DDP broadcasts.

    Of an alias its target's name is compared: other nodes may have a separate tensor there.
    """
    own = leaf.alias_of is None or leaf.role.value not in _SAME_BY_CONSTRUCTION
    return scope == "replicated" and own and leaf.name not in broadcast


def fails_when_different(leaf: Leaf | LeafSpec, forced: Collection[str] = ()) -> bool:
    """Whether a difference fails the save: parameters, optimizer state, forced leaves or blobs."""
    return leaf.role.value in _SAME_BY_CONSTRUCTION or leaf.name in forced or leaf.blob in forced


def digests_of(leaves: Iterable[Leaf], mode: Mode) -> dict[str, str]:
    """Digests of leaves that are to be compared; `mode` concerns parameters and optimizer tensors."""
    return {leaf.name: _digest(leaf, mode) for leaf in leaves}


def verdict(digests_by_node: Mapping[int, ByLeaf], forced_replicated: Collection[str]) -> ReplicaVerdict:
    """Judge digests of all nodes. A leaf is compared between the nodes that have it.

    `forced_replicated` names the leaves whose difference fails the save.
    """
    found: dict[str, dict[int, str]] = {}
    for node in sorted(digests_by_node):
        for name, digest in digests_by_node[node].items():
            found.setdefault(name, {})[node] = digest
    different = {name: nodes for name, nodes in sorted(found.items()) if len(set(nodes.values())) > 1}
    return ReplicaVerdict(
        demote=frozenset(name for name in different if name not in forced_replicated),
        failures={name: _minority(nodes) for name, nodes in different.items() if name in forced_replicated},
    )


@dataclass(frozen=True)
class Lone:
    """Leaves with no other known holder; hashed only if another node has the same names."""

    names: tuple[str, ...]
    digest: Callable[[Mode], ByLeaf]


def compare_replicas(
    peers: Peers,
    topic: str,
    digest: Callable[[], Mapping[int, Sequence[ByLeaf]]],
    forced_replicated: Collection[str],
    *,
    lone: Mapping[int, Sequence[Lone]] | None = None,
    due: bool = False,
) -> ReplicaVerdict:
    """Compare the nodes of all processes; every process gets the same verdict.

    `digest` makes the digests of the nodes that this process hosts, in groups: first leaves that any node may
    have, then parts of meshes; groups with the same names are the same parts. An error in it raises on all.
    `due`: this process requests a full comparison; lone leaves are then compared.

    A group is sent as two digests, of its names and its content. Details follow only for groups with a
    difference, and one per leaf set if nodes have different leaves in their first group.
    """
    hosted: dict[int, list[ByLeaf]] = {}
    alone = lone or {}

    def look() -> list[Json]:
        hosted.update({node: list(groups) for node, groups in digest().items()})
        return [
            [
                node,
                [_combined(one) for one in hosted[node]],
                [_named(one.names) for one in alone.get(node, ())],
                due,
            ]
            for node in sorted(hosted)
        ]

    answers = together(peers, topic, look)
    posted = sorted((one for answer in answers for one in answer), key=lambda one: int(one[0]))
    wanted = any(of_node for *_, of_node in posted)
    groups = [(node, index, *pair) for node, pairs, *_ in posted for index, pair in enumerate(pairs)]
    counts = Counter(names for _, _, lones, _ in posted for names in lones)
    twins = frozenset(names for names, count in counts.items() if count > 1)
    if twins:
        mode = Mode.WHOLE if wanted else Mode.SAMPLES
        groups += _twins(peers, topic, hosted, alone, twins, mode)
    asked = _asked(groups)
    if not asked:
        return ReplicaVerdict(due=wanted)
    details = [
        [node, {name: one for index, group in enumerate(hosted[node]) if (node, index) in asked
                for name, one in group.items()}]
        for node in sorted(hosted)
    ]  # fmt: skip
    answers = peers.exchange(f"{topic}, in detail", details)
    by_node = {node: digests for answer in answers for node, digests in answer}
    # Forced by any process counts for all: nodes with different leaves know only their own.
    forced = peers.exchange(f"{topic}, forced", sorted(forced_replicated))
    found = verdict(by_node, frozenset(name for answer in forced for name in answer))
    return replace(found, due=wanted)


_Group = tuple[int, int, str, str]
"""A node's group: node, index, digest of the names, digest of the content."""


def _twins(
    peers: Peers,
    topic: str,
    hosted: Mapping[int, list[ByLeaf]],
    alone: Mapping[int, Sequence[Lone]],
    twins: Collection[str],
    mode: Mode,
) -> list[_Group]:
    """Hash the lone groups that other nodes have too; they become groups of `hosted`."""

    def look() -> list[Json]:
        found: list[Json] = []
        for node, lones in sorted(alone.items()):
            for one in lones:
                if _named(one.names) in twins:
                    hosted[node].append(one.digest(mode))
                    found.append([node, len(hosted[node]) - 1, *_combined(hosted[node][-1])])
        return found

    answers = together(peers, f"{topic}, of several meshes", look)
    return [(one[0], one[1], one[2], one[3]) for answer in answers for one in answer]


def _asked(groups: Sequence[_Group]) -> frozenset[tuple[int, int]]:
    """The groups whose details are needed: all of one name set with a difference.

    For first groups with different leaf sets also one per set, for the leaves that these share.
    """
    alike: dict[tuple[bool, str], list[_Group]] = {}
    for one in groups:
        alike.setdefault((one[1] == 0, one[2]), []).append(one)
    asked: set[tuple[int, int]] = set()
    several = sum(first for first, _ in alike) > 1
    unlike_first = False
    for (first, _), members in alike.items():
        if len({content for *_, content in members}) > 1:
            asked.update((node, index) for node, index, *_ in members)
            unlike_first = unlike_first or first
    for (first, _), members in alike.items():
        if first and (several or unlike_first):
            asked.add(members[0][:2])
    return frozenset(asked)


def _combined(digests: ByLeaf) -> list[str]:
    names = sorted(digests)
    return [_named(names), _hash("".join(digests[name] for name in names).encode())]


def _named(names: Iterable[str]) -> str:
    return _hash(canonical_json.dumps(sorted(names)))


def _minority(nodes: Mapping[int, str]) -> tuple[int, ...]:
    counts = Counter(nodes.values())
    usual = max(counts, key=lambda digest: (counts[digest], digest == nodes[min(nodes)]))
    return tuple(node for node, digest in nodes.items() if digest != usual)


def _digest(leaf: Leaf, mode: Mode) -> str:
    tensor = leaf.content
    if isinstance(tensor, Value):
        return _hash(canonical_json.dumps(tensor.json))
    if leaf.alias_of is not None:
        return _hash(f"alias of {leaf.alias_of}".encode())
    tensor = local_of(tensor)
    hashed = xxhash.xxh3_128(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
    sampled = mode is Mode.SAMPLES and leaf.role.value in _SAME_BY_CONSTRUCTION
    for piece in _samples(tensor, leaf.name) if sampled else [dtypes.stored_bytes(tensor, leaf.name)]:
        hashed.update(piece)
    return str(hashed.hexdigest())


def _samples(tensor: torch.Tensor, name: str) -> Iterator[memoryview]:
    """Evenly spread stretches; only these leave the device."""
    if tensor.is_cpu and tensor.is_contiguous():  # then this makes no copy
        view = dtypes.stored_bytes(tensor, name)
        yield from (view[first:last] for first, last in stretches(tensor.nbytes, "samples"))
        return
    flat, width = tensor.detach().reshape(-1), tensor.element_size()
    for first, last in stretches(tensor.nbytes, "samples"):
        view = dtypes.stored_bytes(flat[first // width : -(-last // width)], name)
        yield view[first % width :][: last - first]


def _hash(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def checked_every(epochs: int | None) -> int:
    """Epochs between full comparisons, checked; raises UsageError."""
    if epochs is None:
        return WHOLE_EVERY
    if type(epochs) is int and epochs >= 1:
        return epochs
    raise UsageError(f"invalid compare_every={epochs!r:.80}: expected a whole number of epochs from 1")


@dataclass(frozen=True)
class MeshParts:
    """A node's parts of leaves on meshes of one sort; `lone` if no other place of its mesh holds them."""

    leaves: tuple[Leaf, ...]
    lone: bool


class WholeBytes:
    """A full comparison of replicated parameters and optimizer state, made before the commit.

    They are hashed while the shards are written. In an asynchronous save, unguarded leaves are hashed before
    the call returns, the others before the gate opens. `groups` are, by node, leaves that are compared
    together; `compared` is called with whether all were equal.
    """

    def __init__(
        self, job: SaveJob, groups: Mapping[int, Sequence[Sequence[Leaf]]], compared: Callable[[bool], None]
    ) -> None:
        self._message = partial(
            differences_message, job.position, {place.rank: str(place) for place in job.places}
        )
        self._left = {
            node: [{leaf.name: leaf for leaf in group} for group in some] for node, some in groups.items()
        }
        self._digests: dict[int, list[dict[str, str]]] = {
            node: [{} for _ in some] for node, some in groups.items()
        }
        self._names = {leaf.name for some in groups.values() for group in some for leaf in group}
        self._compared = compared

    def hash_but(self, guarded: Mapping[int, Collection[int]]) -> None:
        """Hash leaves that are not at one of these addresses, by node."""
        for node, groups in self._left.items():
            later = guarded.get(node, ())
            for group, digests in zip(groups, self._digests[node], strict=True):
                for leaf in [
                    leaf
                    for leaf in group.values()
                    if isinstance(leaf.content, Value) or leaf.content.data_ptr() not in later
                ]:
                    _hash_one(leaf.name, group, digests)

    def hash_rest(self) -> None:
        """Hash the remaining leaves, and release them."""
        for hash_one in self.each_left():
            hash_one()

    def each_left(self) -> Iterator[Callable[[], None]]:
        """The steps of `hash_rest`, one per leaf; any thread may call them, and a failed one stays pending.

        The save has copied samples of every leaf before, after pending work on its device.
        """
        for node, groups in self._left.items():
            for group, digests in zip(groups, self._digests[node], strict=True):
                for name in tuple(group):
                    yield partial(_hash_one, name, group, digests)

    def compare(self, peers: Peers, failed: Exception | None = None) -> None:
        """Raise SaveFailedError, naming leaves and nodes, on all processes; reports `failed` to all."""

        def hashed() -> Mapping[int, Sequence[Mapping[str, str]]]:
            if failed is not None:
                raise failed
            self.hash_rest()  # nothing is, unless an error occurred before
            return self._digests

        verdict = compare_replicas(peers, "save: all bytes of replicas", hashed, self._names)
        self._compared(not verdict.failures)
        if verdict.failures:
            raise SaveFailedError(self._message(verdict.failures))


def _hash_one(name: str, left: dict[str, Leaf], digests: dict[str, str]) -> None:
    digests.update(digests_of([left[name]], Mode.WHOLE))
    del left[name]


def parts_of_node(state: NodeState) -> list[MeshParts]:
    """A node's parts of leaves on meshes: first those that others hold too."""
    shared = shared_parts(state.leaves, state.specs, state.rank)
    return [*shared, *lone_parts(state.leaves, state.specs, state.rank)]


def shared_parts(leaves: Mapping[str, Leaf], specs: Sequence[LeafSpec], node: int) -> list[MeshParts]:
    """A node's parts that other places of the mesh hold too, named by their first box, a group per mesh."""
    found: dict[object, list[Leaf]] = {}
    for spec, mesh in _placed(specs, node):
        first = tuple(side[0] for side in mesh.local_intervals(spec.shape, node) if side)
        if mesh.replicas > 1 and len(first) == len(spec.shape):
            part = _part(leaves[spec.name], f"{spec.name} {describe(first)}")
            found.setdefault((mesh.extents, mesh.placements), []).append(part)
    return [MeshParts(tuple(group), lone=False) for group in found.values()]


def lone_parts(leaves: Mapping[str, Leaf], specs: Sequence[LeafSpec], node: int) -> list[MeshParts]:
    """A node's parts that no other place of its mesh holds, a group per blob and mesh.

    They are named by their place, because the same leaf may be on other sub-meshes of the same form.
    """
    found: dict[object, list[Leaf]] = {}
    for spec, mesh in _placed(specs, node):
        if mesh.replicas == 1:
            place = f"{spec.name} (place {mesh.place[node]} of {list(mesh.extents)})"
            key = (spec.blob, mesh.extents, mesh.placements)
            found.setdefault(key, []).append(_part(leaves[spec.name], place))
    return [MeshParts(tuple(group), lone=True) for group in found.values()]


def _placed(specs: Sequence[LeafSpec], node: int) -> Iterator[tuple[LeafSpec, Mesh]]:
    for spec in specs:
        if spec.sharding is not None and spec.alias_of is None and node in spec.sharding.place:
            yield spec, spec.sharding


def _part(leaf: Leaf, name: str) -> Leaf:
    if isinstance(leaf.content, Value):
        return leaf
    return replace(leaf, name=name, content=local_of(leaf.content))


def differences_message(
    position: Position, names: Mapping[int, str], failures: Mapping[str, tuple[int, ...]]
) -> str:
    """The message of a save that fails because replicas differ."""
    parts = [
        f"{leaf} differs on {', '.join(names[node] for node in nodes)}" for leaf, nodes in failures.items()
    ]
    more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return (
        f"epoch {position}: replicas differ: {'; '.join(parts[:5])}{more}. Parameters and optimizer "
        "state must be the same on all ranks (wrap the module with torchrelay.data_parallel, build it "
        "after torchrelay.seed); register what may differ with scope='rank'"
    )
