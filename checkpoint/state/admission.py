"""Which tensors can be leaves. The others are refused by name, with the way out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.checkpoint.disk.dtypes import check_dense, logical_dtype
from torchrelay.checkpoint.state.dtensors import is_sharded
from torchrelay.errors import BlobError

_PLAIN = (torch.Tensor, nn.Parameter)


def admitted(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor detached, sharing its memory; raises BlobError for what cannot be stored.

    Refused are tensors that are sparse, quantised, nested, on the meta device or not yet initialised,
    subclasses other than Parameter and DTensor, and element types without a stored form.
    """
    plain = type(tensor) in _PLAIN
    if not plain and isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise BlobError(f"{name} is not initialised yet: run one forward pass of the lazy module in setup")
    if not plain and is_sharded(tensor):
        return tensor.detach()
    check_dense(tensor, name)
    if not plain:
        raise BlobError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}: a tensor subclass would come"
            " back as a plain tensor; register x.as_subclass(torch.Tensor), or an object with state_dict"
        )
    logical_dtype(tensor.dtype, name)
    return tensor.detach()


def admitted_in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """As `admitted`, for a tensor that a load writes into: its elements must not share memory."""
    found = admitted(tensor, name)
    if not found.is_contiguous() and not is_sharded(found) and _repeats(found):
        raise BlobError(f"{name} is expanded, so it cannot be loaded in place: register a clone() of it")
    return found


def _repeats(tensor: torch.Tensor) -> bool:
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for size, stride in sized)
