"""Capture a node's blobs at the moment of a save, by reference, and warn of what is left out.

Every leaf is compared with its spec of the last save, and described again if it differs. Unchanged specs stay
the same objects, so that all that depends on them (digests, classes, the plan) is cached by identity. The
length of a small value may change without a new spec; the manifest gets the true size at the write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from torchrelay.checkpoint.format.dtypes import logical_name
from torchrelay.checkpoint.format.manifest.schema import VALUE_LIMIT_BYTES
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import place_of
from torchrelay.checkpoint.format.names import format_key, nearest
from torchrelay.checkpoint.format.position import Position, Selection, matches_any
from torchrelay.checkpoint.save.assignments import Assignment
from torchrelay.checkpoint.state.checkpoint_set import (
    RNG_BLOB,
    SetMember,
    newcomers,
    scopes_of,
    select,
    used_patterns,
)
from torchrelay.checkpoint.state.flatten import ModuleStates, classes_of, leaves_of, named_leaves
from torchrelay.checkpoint.state.leaf import (
    MAIN_GROUP,
    Leaf,
    LeafSpec,
    Role,
    Value,
    device_of,
    is_sharded,
    local_of,
    order_of,
    spec_of,
)
from torchrelay.checkpoint.state.module_leaves import PARAMS
from torchrelay.checkpoint.state.names import kind_of, local_part, memory_place, overlaps_of
from torchrelay.checkpoint.state.restore.gradients import gradient_leaves
from torchrelay.checkpoint.state.restore.rehearsal import NodeStructure, arrays_of, rehearse
from torchrelay.checkpoint.state.steps import STEPS, replaced_optimizer, unsaved_optimizers
from torchrelay.errors import BlobError, SaveFailedError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Session, warn
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass

Relations = tuple[list[list[int]], dict[str, tuple[str, int]], dict[str, str], dict[str, type]]
"""Of optimizers the parameters in each group, by identity; partial overlaps of memory; arrays; and blobs that
no later launch could fill, with their classes."""
Order = tuple[int, ...] | None
_SHORT = (type(None), bool, int, float)
"""JSON that is short for any value, so that its length decides nothing."""


Structure = tuple[tuple[LeafSpec, ...], Mapping[str, str]]
"""Specs of a node's leaves, in order, and their scopes by name; neither ever changes."""


@dataclass(eq=False)
class NodeHistory:
    """What is known of a hosted node from its start and its last save; holds no tensors."""

    last: Structure | None = None
    start: NodeStructure | None = None
    """What the program built, before anything was loaded or trained."""
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Memory order of what the program built."""
    rehearsed: tuple[tuple[LeafSpec, ...], Relations | None] = ((), None)
    """Leaves, and their relations, of which a load was found to fit."""
    shown: frozenset[str] | None = None
    """Wrapper subclasses that objects had initially, or that a load found a place for."""

    def structure(self, leaves: Sequence[Leaf], scopes: Mapping[str, str]) -> Structure:
        """The structure of the leaves, the same object if unchanged; BlobError without a stored form."""
        last = self.last
        known = last[0] if last else ()
        if len(leaves) != len(known):
            by_name = {spec.name: spec for spec in known}
            specs = tuple(_spec(leaf, by_name.get(leaf.name), self.orders) for leaf in leaves)
        else:
            specs = tuple(_spec(leaf, spec, self.orders) for leaf, spec in zip(leaves, known, strict=True))
        if last is None or scopes != last[1] or not _same(specs, last[0]):
            last = self.last = specs, dict(scopes)
        return last

    def began(self, built: Mapping[str, Any], orders: Mapping[str, Order]) -> None:
        """Keep the structure and memory order of what the program built."""
        self.start, self.orders, self.last = NodeStructure(built), orders, None

    def not_made(self, objects: Mapping[str, Any], workspace: Workspace) -> dict[str, type]:
        """Blobs of classes that a load can only fill, where the program builds no object of that class."""
        entries, made = workspace.entries(), self.start.classes if self.start else {}
        return {
            name: kind
            for name, kind in (classes_of(objects) if self.start else {}).items()
            if made.get(name) is not kind and not ((blob := entries[name].blob) and blob.rebuilt)
        }

    def changes(
        self,
        built: Mapping[str, Any],
        lost: Mapping[str, type],
        selection: Selection,
        excluded: Collection[str],
    ) -> list[str]:
        """What the program changed of what it built, in leaves that are saved and not excluded."""
        found = [*self.start.differences(NodeStructure(built))] if self.start else []
        found += [
            (name, f"is a {kind.__name__} now, and none was registered at the start")
            for name, kind in lost.items()
        ]
        named = [one for one in found if selection.saves(one[0]) and not matches_any(one[0], excluded)]
        return [f"{name} {text}" for name, text in named]

    def overlaps(self, leaves: Sequence[Leaf]) -> dict[str, tuple[str, int]]:
        """Current overlaps of those leaves that shared part of their memory when the program built them."""
        if self.start is None or not self.start.overlaps:
            return {}
        names = {*self.start.overlaps, *(other for other, _ in self.start.overlaps.values())}
        shared = {leaf.name: leaf.content for leaf in leaves if leaf.name in names}
        return overlaps_of({name: one for name, one in shared.items() if not isinstance(one, Value)})


def _spec(leaf: Leaf, known: LeafSpec | None, built: Mapping[str, Order]) -> LeafSpec:
    if known is not None and _unchanged(leaf, known):
        return known
    found = spec_of(leaf)
    if found.kind == "tensor" and built.get(leaf.name, found.order) != found.order:
        found = replace(found, order_changed=True)
    if known is None or found == known:
        return known or found
    # Values that differ only in length, and are short enough for a manifest, have one spec.
    small = found.kind == "value" and max(found.nbytes, known.nbytes) <= VALUE_LIMIT_BYTES
    return known if small and replace(found, nbytes=known.nbytes) == known else found


def _unchanged(leaf: Leaf, known: LeafSpec) -> bool:
    """Whether a leaf visibly matches its spec. False also means that it must be described again."""
    content = leaf.content
    if isinstance(content, Value):
        alike = type(content.json) in _SHORT and known.kind == "value" and known.nbytes <= VALUE_LIMIT_BYTES
    elif known.sharding is not None or is_sharded(content):
        return False
    else:
        alike = content.shape == known.shape and logical_name(content.dtype) == known.dtype
        alike = alike and order_of(content) == known.order
        device = None if content.is_cpu else device_of(leaf.role, content)
        alike = alike and device == known.device
    return (
        alike
        and leaf.name == known.name
        and leaf.blob == known.blob
        and leaf.role is known.role
        and leaf.group == known.group
        and leaf.alias_of == known.alias_of
        and leaf.frozen is known.frozen
        and leaf.same_as == known.same_as
    )


def _same(one: tuple[LeafSpec, ...], other: tuple[LeafSpec, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


@dataclass(frozen=True)
class NodeState:
    """A hosted node at the moment of a save. `place` has the name under which the node is stored."""

    place: NodePlace
    leaves: Mapping[str, Leaf]
    specs: tuple[LeafSpec, ...]
    scopes: Mapping[str, str]
    objects: Mapping[str, Any]
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the leaves of parameters, by id; empty if not recorded."""
    staged: Mapping[str, memoryview] = field(default_factory=dict)
    """Copies of what is written, by the key under which a shard holds it; they are written instead."""

    @property
    def rank(self) -> int:
        """The node's number in plans and manifests."""
        return self.place.rank

    def piece(self, assignment: Assignment) -> torch.Tensor | memoryview:
        """The bytes of a tensor that this node writes: the staged copy, if there is one."""
        staged = self.staged.get(format_key(assignment.key)) if self.staged else None
        return self.tensor(assignment) if staged is None else staged

    def tensor(self, assignment: Assignment) -> torch.Tensor:
        """That part without a copy: a whole tensor, a flat range of elements, or a box of its shard."""
        spec, tensor = assignment.leaf, self.leaves[assignment.leaf.name].content
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{spec.name} is a value")
        if assignment.box is not None and spec.sharding is not None:
            place = place_of(spec.sharding.local_intervals(spec.shape, self.rank), assignment.box)
            return local_of(tensor)[tuple(slice(*side) for side in place)]
        return tensor if assignment.whole else tensor.reshape(-1)[assignment.first : assignment.last]


def capture(
    session: Session,
    place: NodePlace,
    stored_name: str,
    members: Mapping[str, SetMember],
    demoted: set[str],
    history: NodeHistory,
    selection: Selection,
    not_resumed: Collection[str],
) -> NodeState:
    """List the leaves of a hosted node, its random states included; tensors are not copied.

    `history` is that of the node. Random states are listed for any `selection`. A resume skips leaves that
    match a pattern in `not_resumed`. Leaves of a new structure are rehearsed, so that nothing is saved that a
    resume would refuse.

    Raises BlobError, with the path, for what cannot be stored or resumed, and SaveFailedError for a missing
    name of the set.
    """
    workspace = session.workspace(place.name)
    objects = _objects(workspace, place, members)
    states = ModuleStates()
    listed, names = named_leaves(objects, states)
    learning = {leaf.blob for leaf in listed if leaf.frozen is False}
    gradients = gradient_leaves(objects, names, selection.saves, learning)
    leaves = [*select(listed, objects, selection), *gradients, *random_leaves(session.streams(place.name))]
    specs, scopes = history.structure(leaves, scopes_of(leaves, members, objects, demoted))
    start = history.start
    # The value that `ctx[name] = ...` put in place of an array may have another form.
    arrays = arrays_of(built_by_program(workspace)) if start is not None and start.arrays else {}
    lost = history.not_made(objects, workspace)
    relations = groups_of(objects), history.overlaps(leaves), arrays, lost
    fitting, known = history.rehearsed
    if known != relations or not _same(specs, fitting):
        chosen = {leaf.name for leaf in leaves}
        rehearse(
            _as_started(workspace, members),
            leaves,
            specs,
            states,
            str(place),
            kept={leaf.name for leaf in listed if leaf.name not in chosen},
            shown=history.shown,
            changed=history.changes(built_by_program(workspace), lost, selection, not_resumed),
        )
        history.rehearsed = specs, relations
        if history.shown is None:  # the first ones stand for the initial objects
            history.shown = frozenset(spec.name for spec in specs if spec.role is Role.SUBCLASS)
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec.sharding is not None:
            _check_local(leaf, spec, spec.sharding, place)
    return NodeState(
        replace(place, name=stored_name), {leaf.name: leaf for leaf in leaves}, specs, scopes, objects, names
    )


def check_whole(state: NodeState) -> None:
    """Raise BlobError for shards of a node if not all nodes are saved: the others would be missing."""
    shards = [spec.name for spec in state.specs if spec.sharding is not None]
    shards += [
        blob
        for blob, value in state.objects.items()
        if isinstance(value, torch.optim.Optimizer) and local_part(value) is not value
    ]
    if shards:
        raise BlobError(
            f"{shards[0]} of {state.place} is in shards, and nodes_to_checkpoint leaves out other nodes: "
            "leave nodes_to_checkpoint out"
        )


def _objects(workspace: Workspace, place: NodePlace, members: Mapping[str, SetMember]) -> dict[str, Any]:
    gone = [name for name in members if name not in workspace]
    if gone:
        raise SaveFailedError(
            f"{', '.join(map(repr, gone))} of the checkpoint set is gone from the workspace of {place}: "
            "keep the name"
        )
    entries = workspace.entries()
    for check in [entry.check for entry in entries.values() if entry.check is not None]:
        check()
    return {name: workspace[name] for name in members}


def built_by_program(workspace: Workspace) -> dict[str, Any]:
    """Registered objects that every launch builds in the same way, wherever it resumes from."""
    return {
        name: entry.target
        for name, entry in workspace.entries().items()
        if (blob := entry.blob) is not None and blob.scope is not Scope.TRANSIENT and not blob.rebuilt
    }


def _as_started(workspace: Workspace, members: Mapping[str, SetMember]) -> dict[str, Any]:
    """Registered objects as a later launch makes them: replaced ones as originally given."""
    found: dict[str, Any] = {}
    for name, entry in workspace.entries().items():
        if name in members and entry.blob is not None:
            given = entry.target if entry.blob.is_factory else entry.blob.source
            found[name] = entry.target if kind_of(given) is kind_of(entry.target) else given
    return found


def _check_local(leaf: Leaf, spec: LeafSpec, mesh: Mesh, place: NodePlace) -> None:
    """Raise BlobError unless the local part has the shape that its placements imply."""
    if isinstance(leaf.content, Value):
        return
    expected = mesh.local_shape(spec.shape, place.rank)
    local = local_of(leaf.content)
    if tuple(local.shape) == expected or (expected is None and local.numel() == 0):
        return
    wanted = "none, because it is not in the mesh" if expected is None else f"{list(expected)}"
    raise SaveFailedError(
        f"the local part of {leaf.name!r} on rank {place.rank} has shape {list(local.shape)}; by its "
        f"placements it has {wanted}: make the tensor with distribute_tensor or fully_shard, on a mesh "
        "of the job's ranks"
    )


def random_leaves(streams: RandomStreams) -> list[Leaf]:
    """Random states as tensors of bytes: `rng.python`, `rng.numpy`, `rng.torch`, `rng.cuda.<i>`."""
    return [
        Leaf(
            f"{RNG_BLOB}.{name}",
            RNG_BLOB,
            Role.RNG,
            MAIN_GROUP,
            torch.frombuffer(bytearray(data), dtype=torch.uint8),
        )
        for name, data in streams.encode().items()
    ]


class Unsaved:
    """Warns once about what is not saved."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._looked_at_patterns = selection.everything
        self._warned_names: set[str] = set()
        self._warned_optimizers = WeakSet[Optimizer]()
        self._steps_before = {key: step.grads for key, step in STEPS.items()}
        """The gradients of steps before this run, such as those of an earlier run of the process."""
        self._looked_at_parameters = False
        self._replaced = 0
        """Saves at which registered optimizers looked replaced."""

    def patterns(self, session: Session, states: Sequence[NodeState], position: Position) -> None:
        """Warn of patterns that match no leaf of any node, once optimizers have state."""
        if self._looked_at_patterns or position.epoch == 0:
            return
        self._looked_at_patterns = True
        names = {leaf.name for state in states for leaf in leaves_of(state.objects)}
        used = session.peers.exchange("save: patterns", used_patterns(names, self._selection))
        unused = [one for one in self._selection.patterns if not any(one in part for part in used)]
        if unused and session.peers.rank == 0:
            known = nearest(unused[0], names)
            text = f"no leaf matches {', '.join(map(repr, unused))} of include= and exclude={known}"
            warn(text, stacklevel=2)

    def late_names(self, session: Session, place: NodePlace, members: Mapping[str, SetMember]) -> None:
        """Warn of names created too late to be saved."""
        late = [
            name
            for name in newcomers(session.workspace(place.name), members)
            if name not in self._warned_names
        ]
        if late:
            self._warned_names.update(late)
            warn(
                f"{', '.join(map(repr, late))} appeared on {place} after init and will not be saved: "
                "register it as a blob",
                stacklevel=2,
            )

    def training(self, session: Session, place: NodePlace, state: NodeState) -> None:
        """Warn of optimizers and parameters that are trained but not saved."""
        held = (entry.target for entry in session.workspace(place.name).entries().values())
        unsaved: list[tuple[Optimizer, str]] = []
        replaced = None
        if STEPS:
            known, before = self._warned_optimizers, self._steps_before
            steps = [step for key, step in STEPS.items() if step.grads is not before.get(key)]
            unsaved = list(unsaved_optimizers(steps, state.names, held, state.leaves.values(), known))
            replaced = replaced_optimizer(steps, state.objects, state.names)
        self._warned_optimizers.update(optimizer for optimizer, _ in unsaved)
        texts = [
            f"{type(optimizer).__name__}, which trains {name}, is not a blob: its state is not saved, "
            "and a resumed run begins without it. Register it: blobs=dict(..., optimizer=optimizer)"
            for optimizer, name in unsaved
        ]
        self._replaced += replaced is not None
        if replaced is not None and self._replaced == 2:
            texts.append(
                f"{replaced!r} never stepped, but another optimizer of the same kind did: what the program "
                "trains is not what it registered, and not saved. Build model and optimizer once, before "
                "they are registered"
            )
        left_out = [] if self._looked_at_parameters else self._left_out(state)
        self._looked_at_parameters = True
        if left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            texts.append(
                f"{', '.join(left_out[:3])}{more}: trained by a registered optimizer, but absent from "
                "the state_dict() of its module, so it is not saved, and a resume begins with its "
                "initial value. Register it as a separate blob"
            )
        for text in texts if session.peers.rank == 0 else ():
            warn(text, stacklevel=2)

    def _left_out(self, state: NodeState) -> list[str]:
        """Parameters of optimizers that are absent from the `state_dict` of a registered module."""
        optimizers = [value for value in state.objects.values() if isinstance(value, Optimizer)]
        absent = {
            name: one
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
            for one in group[PARAMS]
            if one.requires_grad and (name := state.names.get(id(one))) is not None
            if name not in state.leaves and self._selection.saves(name)
        }
        contents = [leaf.content for leaf in state.leaves.values()] if absent else []
        stored = {memory_place(one) for one in contents if not isinstance(one, Value)}
        return [name for name, one in absent.items() if memory_place(one) not in stored]


def groups_of(objects: Mapping[str, Any]) -> list[list[int]]:
    """Parameters in each group of each optimizer, by identity."""
    optimizers = [one for one in objects.values() if isinstance(one, Optimizer)]
    return [list(map(id, group[PARAMS])) for one in optimizers for group in one.param_groups]
