"""Leaves: the named tensors and values that a node's blobs consist of.

A leaf has content (what a save reads, by reference) and a spec (what planning, manifests and checks
need, without the content). Names are never split: what a blob's tree looked like is stored beside it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.checkpoint.format.dtypes import logical_dtype
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.state.dtensor import is_sharded, sharding_of
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch

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
