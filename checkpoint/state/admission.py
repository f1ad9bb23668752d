"""Which tensors can be leaves. The others are refused by name, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.checkpoint.disk.dtypes import check_dense, is_storable, logical_dtype
from torchrelay.checkpoint.disk.many_tensors import all_dense
from torchrelay.checkpoint.state.dtensors import is_sharded, local_of
from torchrelay.checkpoint.state.subclasses import is_typed_memory, is_wrapper, plain
from torchrelay.errors import BlobError

_PLAIN = (torch.Tensor, nn.Parameter)


def admitted(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor detached, sharing its memory; raises BlobError for what cannot be stored.

    Refused are tensors that are sparse, quantised, nested, on the meta device or not yet initialised,
    subclasses other than Parameter and DTensor, and element types without a stored form.
    """
    if _is_plain(tensor):
        return tensor.detach()
    if type(tensor) not in _PLAIN:
        _check_kind(tensor, name)
    if not is_sharded(tensor):
        check_dense(tensor, name)
        logical_dtype(tensor.dtype, name)
    return tensor.detach()


def is_plain_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that is stored as it is, and can be loaded into: nothing to refuse."""
    return type(value) in _PLAIN and _is_plain(value) and value.is_contiguous()  # type: ignore[attr-defined, arg-type]


def all_plain_memory(values: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """The same of many at once."""
    return (
        all_dense(values)
        and all(map(torch.Tensor.is_contiguous, values))
        and all(map(is_storable, set(map(attrgetter("dtype"), values))))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is the usual case: a tensor of no subclass, dense, of a type that has a stored form."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested) and is_storable(tensor.dtype)


def _check_kind(tensor: torch.Tensor, name: str) -> None:
    """Refuse subclasses, other than DTensor, and what of a DTensor or a wrapper has no stored form."""
    _check_parts(tensor, name)
    if not is_sharded(tensor):
        raise BlobError(_refusal(tensor, name))


def _check_parts(tensor: torch.Tensor, name: str) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise BlobError(f"{name} is not initialised yet: run one forward pass of the lazy module in setup")
    if is_wrapper(tensor):
        raise BlobError(_refusal(tensor, name))
    check_dense(local_of(tensor), f"the local part of {name}" if is_sharded(tensor) else name)
    logical_dtype(tensor.dtype, name)


def _refusal(tensor: torch.Tensor, name: str) -> str:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_wrapper(tensor):
        return (
            f"{name} is a {kind}, which a load could not build, because no live tensor of its kind stands in "
            "its place: register an object that holds it and has state_dict and load_state_dict"
        )
    if own := sorted(getattr(tensor, "__dict__", None) or ()):
        return (
            f"{name} is a {kind} with attributes of its own ({', '.join(own)}), which would be lost: give it "
            "__tensor_flatten__ and __tensor_unflatten__, or register an object with state_dict"
        )
    return (
        f"{name} is a {kind}: a tensor subclass would come"
        " back as a plain tensor; register x.as_subclass(torch.Tensor), or an object with state_dict"
    )


def admitted_in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """As `admitted`, for a tensor that a load writes into: its elements must not share memory.

    It stays what it is, so a subclass is admitted that adds only a type to plain memory.
    """
    if _is_plain(tensor) and tensor.is_contiguous():
        return tensor.detach()  # no element of a contiguous one is met twice
    _check_parts(tensor, name)
    found = plain(tensor) if is_typed_memory(tensor) else admitted(tensor, name)
    if not is_sharded(found) and _repeats(found):
        raise BlobError(f"{name} is expanded, so it cannot be loaded in place: register a clone() of it")
    return found


def _repeats(tensor: torch.Tensor) -> bool:
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for size, stride in sized)
