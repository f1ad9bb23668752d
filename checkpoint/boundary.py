"""The boundary of a save: what a node's blobs are at this moment, by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import torch

from torchrelay.checkpoint.format.layouts import place_of
from torchrelay.checkpoint.format.manifest.position import EVERYTHING, Selection
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.planning.assignments import Assignment
from torchrelay.checkpoint.state.checkpoint_set import RNG_BLOB, Member, scopes_of, select
from torchrelay.checkpoint.state.dtensor import local_of
from torchrelay.checkpoint.state.flatten import named_leaves
from torchrelay.checkpoint.state.gradients import gradient_leaves
from torchrelay.checkpoint.state.kinds import kind_of, local_part
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, LeafSpec, Role, Value
from torchrelay.checkpoint.state.leaves.module import ModuleStates
from torchrelay.checkpoint.state.restore.rehearsal import Start, arrays_of, groups_of, rehearse
from torchrelay.checkpoint.structure import Structures
from torchrelay.errors import BlobError, SaveFailedError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Session
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass


@dataclass(frozen=True)
class NodeState:
    """A hosted node at the boundary. `place` carries the name under which the node is stored."""

    place: NodePlace
    leaves: Mapping[str, Leaf]
    specs: tuple[LeafSpec, ...]
    scopes: Mapping[str, str]
    objects: Mapping[str, Any]
    names: Mapping[int, str] = field(default_factory=dict)
    """The leaf names of the parameters, by id; empty where nobody looked."""

    @property
    def rank(self) -> int:
        """The node's number in plans and manifests."""
        return self.place.rank

    def piece(self, assignment: Assignment) -> torch.Tensor | memoryview:
        """What this node writes of a tensor."""
        return self.tensor(assignment)

    def tensor(self, assignment: Assignment) -> torch.Tensor:
        """That part where it lies: all of a tensor, a flat range of elements, or a box of its shard."""
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
    members: Mapping[str, Member],
    demoted: set[str],
    structures: Structures,
    selection: Selection = EVERYTHING,
    resumes: Callable[[str], bool] = lambda name: True,
) -> NodeState:
    """List the leaves of a hosted node, its random states included; tensors are not copied.

    `structures` are those of earlier saves. Random states are listed whatever the `selection` says.
    `resumes` says of a leaf that a resume loads it.

    Leaves of a new structure are rehearsed: what a resume would refuse is not saved.

    Raises BlobError for what cannot be stored or resumed (with its path) and SaveFailedError for a
    name of the set that is gone.
    """
    workspace = session.workspace(place.name)
    objects = _objects(workspace, place, members)
    states = ModuleStates()
    listed, names = named_leaves(objects, states)
    learning = {leaf.blob for leaf in listed if leaf.frozen is False}
    gradients = gradient_leaves(objects, names, selection.saves, learning)
    leaves = [*select(listed, objects, selection), *gradients, *random_leaves(session.streams(place.name))]
    structure = structures.of(place.name, leaves, scopes_of(leaves, members, objects, demoted))
    # What `ctx[name] = ...` has put in the place of an array may be of another form.
    arrays = arrays_of(built_by_program(workspace)) if structures.has_arrays(place.name) else {}
    relations = groups_of(objects), structures.overlaps(place.name, leaves), arrays
    if not structures.is_rehearsed(place.name, structure, relations):
        chosen = {leaf.name for leaf in leaves}
        rehearse(
            _as_started(workspace, members),
            leaves,
            structure.specs,
            states,
            str(place),
            kept={leaf.name for leaf in listed if leaf.name not in chosen},
            shown=structures.shown(place.name),
            changed=structures.changes(
                place.name,
                Start(built_by_program(workspace)),
                lambda name: resumes(name) and selection.saves(name),
            ),
        )
        structures.rehearsed(place.name, structure, relations)
    for leaf, spec in zip(leaves, structure.specs, strict=True):
        if spec.sharding is not None:
            _check_local(leaf, spec, spec.sharding, place)
    return NodeState(
        replace(place, name=stored_name),
        {leaf.name: leaf for leaf in leaves},
        structure.specs,
        structure.scopes,
        objects,
        names,
    )


def check_whole(state: NodeState) -> None:
    """Refuse shards of a node, by BlobError, where not all nodes are saved: nobody would have the rest."""
    shards = [spec.name for spec in state.specs if spec.sharding is not None]
    shards += [
        blob
        for blob, value in state.objects.items()
        if isinstance(value, torch.optim.Optimizer) and local_part(value) is not value
    ]
    if shards:
        raise BlobError(
            f"{shards[0]} of {state.place} is in shards, and nodes_to_checkpoint leaves out other nodes: "
            "name all nodes, or leave nodes_to_checkpoint out"
        )


def _objects(workspace: Workspace, place: NodePlace, members: Mapping[str, Member]) -> dict[str, Any]:
    """What the set's names hold; raises SaveFailedError for one that is gone."""
    gone = [name for name in members if name not in workspace]
    if gone:
        raise SaveFailedError(
            f"{', '.join(map(repr, gone))} of the checkpoint set is gone from the workspace of {place}: "
            "keep the name, or register it with scope='transient'"
        )
    entries = workspace.entries()
    for check in [entry.check for entry in entries.values() if entry.check is not None]:
        check()
    return {name: workspace[name] for name in members}


def built_by_program(workspace: Workspace) -> dict[str, Any]:
    """The registered objects that every start builds in the same way, whatever it resumes from."""
    return {
        name: entry.target
        for name, entry in workspace.entries().items()
        if (blob := entry.blob) is not None and blob.scope is not Scope.TRANSIENT and not blob.rebuilt
    }


def _as_started(workspace: Workspace, members: Mapping[str, Member]) -> dict[str, Any]:
    """The registered objects as a later start makes them: what is of another kind now, as it was given."""
    found: dict[str, Any] = {}
    for name, entry in workspace.entries().items():
        if name in members and entry.blob is not None:
            given = entry.target if entry.blob.is_factory else entry.blob.source
            found[name] = entry.target if kind_of(given) is kind_of(entry.target) else given
    return found


def _check_local(leaf: Leaf, spec: LeafSpec, mesh: Mesh, place: NodePlace) -> None:
    """Every rank computes from placements alone what the others have: it must be so."""
    if isinstance(leaf.content, Value):
        return
    expected = mesh.local_shape(spec.shape, place.rank)
    local = local_of(leaf.content)
    if tuple(local.shape) == expected or (expected is None and local.numel() == 0):
        return
    wanted = "none, for it is not in the mesh" if expected is None else f"{list(expected)}"
    raise SaveFailedError(
        f"the local part of {leaf.name!r} on rank {place.rank} has shape {list(local.shape)}; by its "
        f"placements it has {wanted}: make the tensor with distribute_tensor or fully_shard, on a mesh of "
        "the job's ranks"
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
