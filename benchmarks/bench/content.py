"""The content of tensors: known bits for every name, whole or sharded, so that loads can be compared."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import numpy
import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NOTHING = -1.0
"""What stands in tensors before a load."""


def known(name: str, like: torch.Tensor) -> torch.Tensor:
    """The content of a whole tensor of this name and shape."""
    if like.dim() == 0:
        return torch.tensor(zlib.crc32(name.encode()) % 1000, dtype=like.dtype)
    found = torch.empty(like.shape, dtype=torch.float32)
    bits = numpy.random.Generator(numpy.random.SFC64(zlib.crc32(name.encode())))
    bits.random(out=found.numpy(), dtype=numpy.float32)
    return found


def fill(tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every tensor its known content, in place."""
    for name, tensor in tensors.items():
        whole = known(name, tensor)
        local_of(tensor).copy_(local_of(_placed_like(whole, tensor)))


def blank(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make sure that nothing of the known content is left, and that all memory was touched."""
    for tensor in tensors.values():
        local_of(tensor).fill_(NOTHING)


def first_difference(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor that does not have its known content; all ranks ask together."""
    wrong = None
    for name, tensor in tensors.items():
        whole = known(name, tensor)
        if is_sharded(tensor) and not _simple(tensor):
            same = torch.equal(tensor.full_tensor(), whole)
        else:
            same = torch.equal(local_of(tensor), local_of(_placed_like(whole, tensor)))
        if not same and wrong is None:
            wrong = name
    return wrong


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; plain ones must not cost the import of what shards."""
    return hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """The bytes of all tensors, whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _simple(tensor: DTensor) -> bool:
    """Whether `distribute_tensor` cuts as this tensor is cut; strided shards are cut otherwise."""
    return len(tensor.placements) == 1


def _placed_like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not is_sharded(tensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
