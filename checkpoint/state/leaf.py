"""Define leaves: the named tensors and values that a node's blobs consist of, DTensors included.

A leaf has content (what a save reads, by reference) and a spec (what planning, manifests and checks need).
Names are never split: the structure of a blob is stored separately.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.checkpoint.format.dtypes import logical_dtype
from torchrelay.checkpoint.format.mesh import MAX_SPLIT_FACTOR, Mesh, intervals_at
from torchrelay.checkpoint.format.mesh_geometry import (
    LocalTarget,
    Placement,
    Replicated,
    Sharded,
    local_target,
)
from torchrelay.errors import BlobError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, without importing torch's DTensor machinery."""
    return _is_dtensor(type(tensor))


@lru_cache(maxsize=64)
def _is_dtensor(kind: type) -> bool:
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def sharding_of(tensor: Any, name: str) -> Mesh:
    """The mesh of a DTensor, by global ranks; raises BlobError for an unsupported placement."""
    mesh, placements = tensor.device_mesh, _described(tensor.placements, tensor.dim(), name)
    known = _meshes.setdefault(mesh, {})
    if placements not in known:
        nodes = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        known[placements] = Mesh(nodes, tuple(mesh.shape), placements)
    return known[placements]


_meshes: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[Placement, ...], Mesh]] = (
    weakref.WeakKeyDictionary()
)
"""One object for equal device meshes (FSDP makes one per module): with thousands of ranks a mesh is large."""


def target_of(tensor: Any, name: str) -> LocalTarget:
    """The part that a DTensor holds here, none outside of its mesh; raises BlobError for another shape."""
    mesh: DeviceMesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    local = tuple(memory_of_shard(tensor).shape)
    if coordinate is None:
        return LocalTarget(local, ())
    known = _targets.setdefault(mesh, {})
    # With their types: placements of different types may be equal and cut differently.
    form = (tensor.shape, tuple(coordinate), tensor.placements, tuple(map(type, tensor.placements)))
    found = known.get(form)
    if found is None:
        described = _described(tensor.placements, tensor.dim(), name)
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
"""By shape, place and placements, so that the many leaves of one form share an object."""
_REMEMBERED = 1 << 10


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, sharing its memory, without autograd; a plain tensor is its own part."""
    return memory_of_shard(tensor).detach() if is_sharded(tensor) else tensor


def memory_of_shard(tensor: Any) -> torch.Tensor:
    """The tensor that a DTensor holds: like `to_local` outside of autograd, and 50 times as fast."""
    local: torch.Tensor = tensor._local_tensor
    return local


def empty_like(model: Any, spec_shape: tuple[int, ...], dtype: torch.dtype, stored: Any) -> DTensor:
    """A new DTensor on the mesh of `model`, without content.

    It has the saved placements if the saved mesh was alike, else those of `model` if the shapes match; else
    it is replicated.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    mesh = model.device_mesh
    if isinstance(stored, Mesh) and stored.extents == tuple(mesh.shape) and _torch_placements(stored):
        placements = _torch_placements(stored)
    elif tuple(model.shape) == spec_shape:
        placements = list(model.placements)
    else:
        placements = [Replicate() for _ in model.placements]
    coordinate = mesh.get_coordinate()
    shape: tuple[int, ...] = (0,)
    if coordinate is not None:
        described = _described(placements, len(spec_shape), "")
        shape = local_target(intervals_at(spec_shape, tuple(mesh.shape), described, tuple(coordinate))).shape
    local = torch.empty(shape, dtype=dtype, device=local_of(model).device)
    whole = torch.empty(spec_shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def stand_in(
    stored: Mesh | None, shape: tuple[int, ...], live: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """A live DTensor on the mesh of a stored one that has no live tensor, or of its shape; None without."""
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
    from torch.distributed.tensor import Replicate, Shard

    if any(isinstance(one, Sharded) and one.split_factor > 1 for one in stored.placements):
        return []
    return [Shard(one.dim) if isinstance(one, Sharded) else Replicate() for one in stored.placements]


def _described(placements: Any, dims: int, name: str) -> tuple[Placement, ...]:
    """Placements in stored form; raises BlobError for partial and strided ones."""
    found: list[Placement] = []
    for one in placements:
        if one.is_replicate():
            found.append(Replicated())
        elif one.is_partial() or not hasattr(one, "dim"):
            raise BlobError(
                f"{name!r} is a DTensor with placement {one}, which is not supported: redistribute it "
                "to Shard or Replicate first"
            )
        else:
            found.append(Sharded(one.dim % dims, int(getattr(one, "split_factor", 1))))
    strides = math.prod(one.split_factor for one in found if isinstance(one, Sharded))
    if strides > MAX_SPLIT_FACTOR:
        raise BlobError(
            f"{name!r} is cut into {strides} strides: redistribute it to Shard or Replicate first"
        )
    return tuple(found)


MAIN_GROUP = "main"
"""The file group of everything except optimizers."""

OPTIM_GROUP = "optim"
"""The file group of optimizers, which retention may delete and an evaluation never reads."""


class Role(str, Enum):
    """The role of a leaf in its blob.

    Only PARAMETER and OPTIMIZER tensors are equal on replicas by construction, so only they are split between
    them. STATE is the tree of an object with `state_dict`, SUBCLASS describes a tensor made of inner tensors
    (see `tree_leaves`); VALUE is any other value. RNG and GRADIENT belong to the position and to no blob of
    the user's (`schema.OF_POSITION`).
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
    def value(self) -> str:  # the base class's property takes six times as long
        """The name in manifests."""
        return self._value_

    def __str__(self) -> str:
        return self._value_


NEEDS_OBJECT = (Role.STATE, Role.SUBCLASS)
"""Roles of a blob's own leaf that can only be loaded into a live object."""


def blob_of(name: str, objects: Collection[str]) -> str | None:
    """The object that a leaf belongs to. No blob's name is a dotted prefix of another's."""
    while name not in objects:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


GRADIENT_PARTS = INDICES, VALUES, UNSHARDED = "@indices", "@values", "@unsharded"
"""Ends of the names of leaves that are a part of a gradient."""


def parameter_of(gradient: str) -> str:
    """The leaf of the parameter whose gradient, or part of it, a leaf is."""
    name = gradient.removeprefix(f"{GRADIENTS}.")
    return next((name.removesuffix(end) for end in GRADIENT_PARTS if name.endswith(end)), name)


@dataclass(frozen=True)
class Value:
    """A Python value in the typed JSON form of `values.encode`; a copy, which later changes do not affect.

    Tensors inside the value are separate leaves, which the form refers to by name.
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

    `content` is a detached tensor that shares the user's memory, or a Value. A leaf with `alias_of` is the
    same object as the leaf of that name and is stored only there. `frozen`: a parameter or registered tensor
    that has no gradient (see `frozen_of`). A leaf `same_as` another is the same tensor, but both are stored,
    because the other is in another file.
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
    """Description of a leaf without its content.

    Attributes:
        dtype: torch's name (`bfloat16`, see `dtypes`), None for values; of a sharded tensor that of the
            whole.
        shape: () for values; of a sharded tensor that of the whole.
        nbytes: logical size in bytes, also of an alias, which stores nothing.
        sharding: the mesh that decides who has which part.
        frozen: None if unknown.
        order: the dimensions from the outermost in memory, see `order_of`.
        order_changed: whether the program built the tensor in another order.
        device, same_as: see `device_of` and `Leaf`.
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

    @property
    def stored_as(self) -> str:
        """The leaf that stores the bytes: another one for an alias."""
        return self.alias_of or self.name

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.kind == "tensor" else "value"


def frozen_of(role: Role | None, tensor: torch.Tensor) -> bool | None:
    """Whether a parameter or registered tensor has no gradient, as computed ones; None for other state."""
    if role is Role.PARAMETER or role is Role.TENSOR:
        return not (tensor.requires_grad and tensor.is_leaf)
    return None


def spec_of(leaf: Leaf) -> LeafSpec:
    """The spec of a leaf; raises BlobError for placements and dtypes that have no stored form."""
    content = leaf.content
    if isinstance(content, Value):
        return LeafSpec(
            leaf.name, leaf.blob, leaf.role, leaf.group, "value", None, (), content.nbytes, leaf.alias_of,
            None, leaf.frozen,
        )  # fmt: skip
    element = logical_dtype(content.dtype, leaf.name)
    shape = tuple(content.shape)
    sharding, order, device = None, None, None
    if is_sharded(content):
        sharding = sharding_of(content, leaf.name)
    else:
        order, device = order_of(content), device_of(leaf.role, content)
    return LeafSpec(
        leaf.name, leaf.blob, leaf.role, leaf.group, "tensor", element.name, shape, element.nbytes(shape),
        leaf.alias_of, sharding, leaf.frozen, order, False, device, leaf.same_as,
    )  # fmt: skip


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory, (0, 2, 3, 1) for channels_last.

    None for the default order, and if elements share memory. Gaps between elements are ignored; dimensions of
    size 1 count, because torch recognises channels_last by their strides.
    """
    shape = tensor.shape
    if tensor.is_contiguous() and 1 not in shape:
        return None
    steps = tensor.stride()
    # Of equal strides the dimension of size 1 is the inner one.
    order = tuple(sorted(range(len(steps)), key=lambda dim: (-steps[dim], shape[dim] == 1)))
    return None if 0 in steps or order == tuple(range(len(steps))) else order


def device_of(role: Role, tensor: torch.Tensor) -> str | None:
    """Device of a parameter or registered tensor: `cuda`, or `cuda:1`, the one after the current.

    None on the CPU, and for buffers and optimizer state, which stay with their objects.
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
    """A tensor with the requires_grad of a saved or live one, as `parameter` if set."""
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


def shared_across_files(specs: dict[str, LeafSpec], in_place: Collection[str] = ()) -> dict[str, LeafSpec]:
    """Tie again what was one tensor and is stored in two files, if both are loaded or `in_place`."""
    shared = {
        spec.name: spec.same_as
        for spec in specs.values()
        if spec.same_as is not None
        and (other := specs.get(spec.same_as, spec if spec.same_as in in_place else None)) is not None
        and (other.kind, other.dtype, other.shape) == (spec.kind, spec.dtype, spec.shape)
    }
    if not shared:
        return specs
    sources = {name: specs[other].stored_as if other in specs else other for name, other in shared.items()}
    return {
        name: replace(spec, alias_of=source)
        if (source := sources.get(spec.stored_as)) is not None and source != name
        else spec
        for name, spec in specs.items()
    }
