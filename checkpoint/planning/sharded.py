"""Sharded leaves in a plan: meshes of one leaf become one, and every place of a mesh must be there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.mesh_geometry import Replicated
from torchrelay.checkpoint.format.utils import first_of_each
from torchrelay.errors import SaveFailedError

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec

Held = tuple["LeafSpec", tuple[int, ...]]
"""A leaf and the nodes that have it."""


def joined(held: Sequence[Held]) -> list[Held]:
    """Leaves of one name and form that lie on several sub-meshes are replicas: one leaf on one mesh.

    The joined mesh has the sub-meshes, by their first nodes, along a new first dimension. Raises
    SaveFailedError, naming the leaf, where a node of a mesh does not have it, or sub-meshes overlap.
    """
    distinct = [(id(leaf.sharding), id(nodes)) for leaf, nodes in held]  # many are the same objects
    for leaf, nodes in first_of_each(distinct, held).values():
        check_complete(leaf, nodes)
    named: dict[str, list[Held]] = {}
    for leaf, nodes in held:
        named.setdefault(leaf.name, []).append((leaf, nodes))
    return [one for group in named.values() for one in (group if len(group) == 1 else _joined_forms(group))]


def _joined_forms(group: Sequence[Held]) -> list[Held]:
    """Of leaves of one name, those that differ only in the nodes of their mesh are made one."""
    found: list[Held] = []
    alike: dict[LeafSpec, list[Held]] = {}
    for leaf, nodes in group:
        if leaf.sharding is None:
            found.append((leaf, nodes))
        else:
            apart = replace(leaf, sharding=replace(leaf.sharding, nodes=()))
            alike.setdefault(apart, []).append((leaf, nodes))
    return found + [_joined(some) if len(some) > 1 else some[0] for some in alike.values()]


def _joined(group: Sequence[Held]) -> Held:
    leaf = group[0][0]
    meshes = sorted((leaf.sharding for leaf, _ in group if leaf.sharding), key=lambda mesh: min(mesh.nodes))
    places = tuple(node for mesh in meshes for node in mesh.nodes)
    if len(set(places)) != len(places):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over meshes that overlap ({', '.join(str(m.nodes) for m in meshes)}): "
            "build its device mesh alike on all ranks"
        )
    extents = (len(meshes), *meshes[0].extents)
    whole = replace(
        meshes[0], nodes=places, extents=extents, placements=(Replicated(), *meshes[0].placements)
    )
    return replace(leaf, sharding=whole), tuple(sorted({node for _, some in group for node in some}))


def check_complete(leaf: LeafSpec, nodes: Sequence[int]) -> None:
    """Raises SaveFailedError, naming the leaf, where a node of its mesh is not one that has it."""
    mesh = leaf.sharding
    if mesh is not None and (absent := sorted(set(mesh.nodes) - set(nodes))):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over ranks {list(mesh.nodes)}, but rank "
            f"{', '.join(map(str, absent))} has no such leaf, or has it placed otherwise: build it with the "
            "same device mesh and placements on all ranks of the mesh"
        )
