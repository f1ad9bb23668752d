"""DTensors seen as leaves: their sharding, their local parts, and new ones like others."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.layouts import Target, local_target
from torchrelay.checkpoint.format.mesh import MAX_SPLIT_FACTOR, Mesh, intervals_at
from torchrelay.checkpoint.format.mesh_geometry import Placement, Replicated, Sharded
from torchrelay.errors import BlobError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor; asks without importing torch's DTensor machinery."""
    return _is_dtensor(type(tensor))


@lru_cache(maxsize=64)
def _is_dtensor(kind: type) -> bool:
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def sharding_of(tensor: torch.Tensor, name: str) -> Mesh:
    """The mesh of a DTensor, by global ranks; raises BlobError naming a placement that has no parts."""
    mesh, placements = _dtensor(tensor).device_mesh, _placements(tensor, name)
    known = _meshes.setdefault(mesh, {})
    if placements not in known:
        nodes = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        known[placements] = Mesh(nodes, tuple(mesh.shape), placements)
    return known[placements]


_meshes: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[Placement, ...], Mesh]] = (
    weakref.WeakKeyDictionary()
)
"""All leaves on equal device meshes (FSDP makes one for every module) have the same object: of thousands of
ranks a mesh is long, and its text is made once."""


def target_of(tensor: torch.Tensor, name: str) -> Target:
    """What of the whole the local tensor of a DTensor holds; nothing on a rank outside of the mesh.

    Raises BlobError where the local tensor has another shape than its placements give it.
    """
    mesh: DeviceMesh = _dtensor(tensor).device_mesh
    coordinate = mesh.get_coordinate()
    local = tuple(memory_of_shard(tensor).shape)
    if coordinate is None:
        return Target(local, ())
    placements = _dtensor(tensor).placements
    known = _targets.setdefault(mesh, {})
    # With their types: a placement may equal one of another type that cuts otherwise.
    form = (tensor.shape, tuple(coordinate), placements, tuple(map(type, placements)))
    found = known.get(form)
    if found is None:
        described = _placements(tensor, name)
        intervals = intervals_at(tuple(tensor.shape), tuple(mesh.shape), described, tuple(coordinate))
        if len(known) >= _REMEMBERED:
            known.clear()
        found = known[form] = local_target(intervals)
    if found.shape != local:
        raise BlobError(
            f"the local part of {name!r} has shape {list(local)}, by its placements it has "
            f"{list(found.shape)}: make the tensor with distribute_tensor or fully_shard"
        )
    return found


_targets: weakref.WeakKeyDictionary[DeviceMesh, dict[object, Target]] = weakref.WeakKeyDictionary()
"""By shape, place and placements: leaves of one form are thousands, and get the same object."""
_REMEMBERED = 1 << 10


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, sharing its memory, without autograd; a plain tensor is its own part."""
    return memory_of_shard(tensor).detach() if is_sharded(tensor) else tensor


def memory_of_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor as it lies in memory: the tensor that the DTensor itself holds.

    `to_local` gives the same outside of autograd; to get there takes as long as fifty of these, and a
    boundary asks several times for every leaf.
    """
    local: torch.Tensor = _dtensor(tensor)._local_tensor
    return local


def empty_like(model: torch.Tensor, spec_shape: tuple[int, ...], dtype: torch.dtype, stored: Any) -> DTensor:
    """A new DTensor on the mesh of `model`, without content.

    It is placed as it was when it was saved, if that was on such a mesh; else as `model`, if it has
    its shape; else every rank holds all of it.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    like = _dtensor(model)
    mesh = like.device_mesh
    if isinstance(stored, Mesh) and stored.extents == tuple(mesh.shape) and _torch_placements(stored):
        placements = _torch_placements(stored)
    elif tuple(model.shape) == spec_shape:
        placements = list(like.placements)
    else:
        placements = [Replicate() for _ in like.placements]
    coordinate = mesh.get_coordinate()
    described = _described(placements, len(spec_shape), "")
    extents = tuple(mesh.shape)
    shape: tuple[int, ...] = (0,)
    if coordinate is not None:
        shape = local_target(intervals_at(spec_shape, extents, described, tuple(coordinate))).shape
    local = torch.empty(shape, dtype=dtype, device=local_of(model).device)
    whole = torch.empty(spec_shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def stand_in(
    stored: Mesh | None, shape: tuple[int, ...], live: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """A live DTensor that a stored one without a place of its own is made like; None where it was none.

    It lies on the mesh where that one was, or, on other ranks, has its shape.
    """
    if stored is None:
        return None
    alike = None
    for one in filter(is_sharded, live):
        mesh = sharding_of(one, "")
        if (mesh.nodes, mesh.extents) == (stored.nodes, stored.extents):
            return one
        alike = one if alike is None and tuple(one.shape) == shape else alike
    return alike


def _torch_placements(stored: Mesh) -> list[Any]:
    """Torch's own placements; empty where it has no public form for one."""
    from torch.distributed.tensor import Replicate, Shard

    if any(isinstance(one, Sharded) and one.split_factor > 1 for one in stored.placements):
        return []
    return [Shard(one.dim) if isinstance(one, Sharded) else Replicate() for one in stored.placements]


def _dtensor(tensor: Any) -> Any:
    return tensor


def _placements(tensor: torch.Tensor, name: str) -> tuple[Placement, ...]:
    return _described(_dtensor(tensor).placements, tensor.dim(), name)


def _described(placements: Any, dims: int, name: str) -> tuple[Placement, ...]:
    found = tuple(_placement(one, dims, name) for one in placements)
    strides = math.prod(one.split_factor for one in found if isinstance(one, Sharded))
    if strides > MAX_SPLIT_FACTOR:
        raise BlobError(
            f"{name!r} is cut into {strides} strides: redistribute it to Shard or Replicate first"
        )
    return found


def _placement(placement: Any, dims: int, name: str) -> Placement:
    if placement.is_replicate():
        return Replicated()
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise BlobError(
            f"{name!r} is a DTensor with placement {placement}, whose parts are not parts of the content: "
            "redistribute it to Shard or Replicate first"
        )
    return Sharded(placement.dim % dims, int(getattr(placement, "split_factor", 1)))
