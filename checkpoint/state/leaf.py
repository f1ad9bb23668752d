"""Leaves: the named tensors and values that a node's blobs consist of, DTensors among them.

A leaf has content (what a save reads, by reference) and a spec (what planning, manifests and checks
need, without the content). Names are never split: what a blob's tree looked like is stored beside it.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.checkpoint.format.dtypes import logical_dtype
from torchrelay.checkpoint.format.layouts import LocalTarget, local_target
from torchrelay.checkpoint.format.mesh import MAX_SPLIT_FACTOR, Mesh, intervals_at
from torchrelay.checkpoint.format.mesh_geometry import Placement, Replicated, Sharded
from torchrelay.errors import BlobError
from torchrelay.records import dataclass

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


def target_of(tensor: torch.Tensor, name: str) -> LocalTarget:
    """What of the whole the local tensor of a DTensor holds; nothing on a rank outside of the mesh.

    Raises BlobError where the local tensor has another shape than its placements give it.
    """
    mesh: DeviceMesh = _dtensor(tensor).device_mesh
    coordinate = mesh.get_coordinate()
    local = tuple(memory_of_shard(tensor).shape)
    if coordinate is None:
        return LocalTarget(local, ())
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


_targets: weakref.WeakKeyDictionary[DeviceMesh, dict[object, LocalTarget]] = weakref.WeakKeyDictionary()
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


MAIN_GROUP = "main"
"""The file group of everything but optimizers."""

OPTIM_GROUP = "optim"
"""The file group of optimizers, which retention may drop and an evaluation never reads."""


class Role(str, Enum):
    """What a leaf is to its blob.

    Only PARAMETER and OPTIMIZER tensors are alike on replicas by construction, so only they are split
    between them. STATE is the tree of an object with `state_dict`, SUBCLASS what a tensor is whose content
    are inner tensors (see `subclasses`); VALUE any other value. RNG and GRADIENT belong
    to the position and to no blob of the user's (`manifest.OF_POSITION`).
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    TENSOR = "tensor"
    VALUE = "value"
    STATE = "state"
    SUBCLASS = "subclass"
    RNG = "rng"
    GRADIENT = "gradient"

    @property
    def value(self) -> str:  # that of the base class takes six times as long
        """The word in manifests."""
        return self._value_

    def __str__(self) -> str:
        return self._value_


NEEDS_OBJECT = (Role.STATE, Role.SUBCLASS)
"""Roles of a blob's own leaf whose content only a live object can take."""


@dataclass(frozen=True)
class Value:
    """A Python value in the typed JSON form of `values.encode`; a copy, later changes do not reach it.

    Tensors inside the value are leaves of their own, which the form refers to by name.
    """

    json: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the compact JSON text."""
        return len(_COMPACT.encode(self.json).encode())


_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One named tensor or value of a blob.

    `content` is a detached tensor that shares the memory of the user's, or a Value. A leaf with
    `alias_of` is the same object as the leaf of that name and is stored only there. `frozen` says of a
    parameter, or of a tensor that a user holds, that it has no gradient (see `frozen_of`). A leaf `same_as`
    another is the same tensor as that one, which lies in another file: both are stored.
    """

    name: str
    blob: str
    role: Role
    group: str
    content: torch.Tensor | Value
    alias_of: str | None = None
    frozen: bool | None = None
    same_as: str | None = None


@dataclass(frozen=True)
class LeafSpec:
    """What is known of a leaf without its content.

    `dtype` is torch's name (`bfloat16`, see `dtypes`), None for values; `shape` is () for values; `nbytes`
    the logical size, also where an alias stores nothing. Of a sharded tensor dtype, shape and bytes are
    those of the whole, and `sharding` says who has which part. `frozen` is None where that is not known.
    `order` has the dimensions from the outermost in memory (see `order_of`); `order_changed` says that the
    program had built the tensor in another order. `device`: see `device_of`; `same_as`: see `Leaf`.
    """

    name: str
    blob: str
    role: Role
    group: str
    kind: Literal["tensor", "value"]
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    alias_of: str | None = None
    sharding: Mesh | None = None
    frozen: bool | None = None
    order: tuple[int, ...] | None = None
    order_changed: bool = False
    device: str | None = None
    same_as: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.kind == "tensor" else "value"


def frozen_of(role: Role | None, tensor: torch.Tensor) -> bool | None:
    """Whether a parameter or a tensor that a user holds has no gradient; None of buffers and other state.

    What a program computed from others that have one will have none: it is no leaf of autograd.
    """
    if role is Role.PARAMETER or role is Role.TENSOR:
        return not (tensor.requires_grad and tensor.is_leaf)
    return None


def spec_of(leaf: Leaf) -> LeafSpec:
    """Describe a leaf; raises BlobError for placements and dtypes that have no stored form."""
    content = leaf.content
    if isinstance(content, Value):
        return _spec(leaf, "value", None, (), content.nbytes)
    element = logical_dtype(content.dtype, leaf.name)
    shape = tuple(content.shape)
    spec = _spec(leaf, "tensor", element.name, shape, element.nbytes(shape))
    if is_sharded(content):
        return replace(spec, sharding=sharding_of(content, leaf.name), same_as=leaf.same_as)
    order, device = order_of(content), device_of(leaf.role, content)
    if order is None and device is None and leaf.same_as is None:
        return spec
    return replace(spec, order=order, device=device, same_as=leaf.same_as)


def _spec(
    leaf: Leaf, kind: Literal["tensor", "value"], dtype: str | None, shape: tuple[int, ...], nbytes: int
) -> LeafSpec:
    described = (kind, dtype, shape, nbytes, leaf.alias_of, None, leaf.frozen)
    return LeafSpec(leaf.name, leaf.blob, leaf.role, leaf.group, *described)


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory, (0, 2, 3, 1) for channels_last.

    None where they lie as they are numbered, and where elements share memory. Gaps between elements count for
    nothing, dimensions of size 1 do: by their strides torch tells channels_last.
    """
    shape = tensor.shape
    if tensor.is_contiguous() and 1 not in shape:
        return None
    steps = tensor.stride()
    # Of equal strides the dimension of size 1 is the inner one.
    order = tuple(sorted(range(len(steps)), key=lambda dim: (-steps[dim], shape[dim] == 1)))
    return None if 0 in steps or order == tuple(range(len(steps))) else order


def device_of(role: Role, tensor: torch.Tensor) -> str | None:
    """Where a parameter or a tensor that a user holds lies: `cuda`, or `cuda:1`, the one after the current.

    None on the CPU, and of buffers and of state of optimizers, which lie where the objects have them.
    """
    if tensor.is_cpu or not (role is Role.PARAMETER or role is Role.TENSOR):
        return None
    where = tensor.device
    if where.type != "cuda":
        return where.type
    import torch  # others read leaves without it

    distance = ((where.index or 0) - torch.cuda.current_device()) % torch.cuda.device_count()
    return f"cuda:{distance}" if distance else "cuda"


def learning(
    tensor: torch.Tensor, spec: LeafSpec, twin: torch.Tensor | None, *, parameter: bool = False
) -> torch.Tensor:
    """A new tensor as a `parameter`, or as one that learns, as the one that was saved or a live one does."""
    from torch import nn  # others read leaves without torch

    able = tensor.is_floating_point() or tensor.is_complex()
    usual = (
        able and (parameter or spec.role is Role.PARAMETER)
        if twin is None
        else twin.requires_grad and twin.is_leaf
    )
    learns = usual if spec.frozen is None else able and not spec.frozen
    if parameter or spec.role is Role.PARAMETER:
        return nn.Parameter(tensor, requires_grad=learns)
    return tensor.requires_grad_() if learns else tensor
