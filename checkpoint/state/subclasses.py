"""Tensor subclasses that wrap other tensors: stored by these, loaded back into those of a live object.

A wrapper says what it consists of by `__tensor_flatten__` (names of inner tensors, and a context) and is
built again by `__tensor_unflatten__`. Stored is a description, a value under the tensor's own name, and
each inner tensor as `<name>.<inner>`. The description is text for comparing: what is loaded must find a
live tensor of the same description, whose class alone builds anything. No class is looked up by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.state.dtensors import is_sharded
from torchrelay.errors import BlobError

_STEPS = ("__tensor_flatten__", "__tensor_unflatten__")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TEXT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_LEVELS = 8


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of inner tensors that it names; DTensors and nested tensors do not count."""
    if type(tensor) in _PLAIN or is_sharded(tensor) or tensor.is_nested:
        return False
    return all(callable(getattr(type(tensor), step, None)) for step in _STEPS)


def is_typed_memory(tensor: torch.Tensor) -> bool:
    """Whether a subclass adds a type to plain memory and nothing else: no inner tensors, no attributes."""
    stock = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return stock and not is_sharded(tensor) and not getattr(tensor, "__dict__", None)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its type, detached, sharing its memory."""
    return (tensor if type(tensor) in _PLAIN else tensor.as_subclass(torch.Tensor)).detach()


def inner_tensors(tensor: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """The inner tensors of a wrapper by their names; they are its own, not copies.

    Raises BlobError where the wrapper computes them, so that nothing could be loaded in place.
    """
    found = {inner: getattr(tensor, inner) for inner in _flattened(tensor)[0]}
    for inner, part in found.items():
        if not isinstance(part, torch.Tensor) or getattr(tensor, inner) is not part:
            raise BlobError(
                f"{name} is a {_class(tensor)} whose __tensor_flatten__ names {inner!r}, which is no tensor "
                "that it keeps: name the tensors that it consists of"
            )
    return found


def description(tensor: torch.Tensor, name: str) -> dict[str, Json]:
    """What a wrapper is beside its inner tensors; raises BlobError for a context that no text describes."""
    inner, context = _flattened(tensor)
    return {
        "class": _class(tensor),
        "context": _text(context, f"the context of {name} ({_class(tensor)})", _LEVELS),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "inner": list(inner),
        "shape": list(tensor.shape),
    }


def told(described: Json) -> str:
    """A description for people."""
    if not isinstance(described, dict):
        return "a value"
    context = "" if described.get("context") == "None" else f" with {described.get('context')}"
    return f"{described.get('class')} of {described.get('dtype')}{described.get('shape')}{context}"


def rebuilder(model: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Builds a wrapper like `model` around other inner tensors; `model` is not kept alive by it."""
    kind: Any = type(model)
    context, size, stride = _flattened(model)[1], model.shape, model.stride()
    return lambda inner: kind.__tensor_unflatten__(dict(inner), context, size, stride)


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    inner, context = tensor.__tensor_flatten__()
    return inner, context


def _class(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _text(value: Any, what: str, levels: int) -> str:
    """A text that equal contexts share, in every process; attributes of classes unknown here are not read."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if levels == 0:
        raise BlobError(f"{what} is nested deeper than {_LEVELS} levels: give a flatter one")
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if type(value) in _TEXT:
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    parts = list(_parts(value, what, levels - 1))
    if type(value) in (set, frozenset):
        parts.sort()
    return f"{kind.removeprefix('builtins.')}({', '.join(parts)})"


def _parts(value: Any, what: str, levels: int) -> Iterator[str]:
    if isinstance(value, (list, tuple)) or type(value) in (set, frozenset):
        yield from (_text(item, what, levels) for item in value)
    elif type(value) is dict:
        pairs = [f"{_text(k, what, levels)}: {_text(v, what, levels)}" for k, v in value.items()]
        yield from sorted(pairs)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f"{field.name}={_text(getattr(value, field.name), what, levels)}"
    else:
        raise BlobError(
            f"{what} holds a {type(value).__module__}.{type(value).__qualname__}, which has no text"
            " to compare by: let __tensor_flatten__ give numbers, text, types, enums or containers of these"
        )
