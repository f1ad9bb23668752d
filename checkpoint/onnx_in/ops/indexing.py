"""Gathering and scattering by places."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _positive(places: Tensor, size: Any) -> Tensor:
    places = places.to(torch.int64)
    return torch.where(places < 0, places + size, places)


def _gather(call: Call, x: Tensor, places: Tensor) -> Tensor:
    axis = call.get("axis", 0) % x.dim()
    flat = _positive(places, x.shape[axis])
    if axis == 0:  # as an embedding looks up its rows
        return (
            x[flat] if x.dim() != 2 or not x.is_floating_point() else torch.nn.functional.embedding(flat, x)
        )
    if places.dim() == 0:
        return x.index_select(axis, flat.reshape(1)).squeeze(axis)
    found = x.index_select(axis, flat.reshape(-1))
    return found.reshape(x.shape[:axis] + tuple(flat.shape) + x.shape[axis + 1 :])


def _gather_elements(call: Call, x: Tensor, places: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    return torch.gather(x, axis, _positive(places, x.shape[axis]))


def _places_nd(x: Tensor, places: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Index tensors for the leading dimensions of `x`: `batch` by counting, the others by `places`."""
    depth = places.shape[-1]
    rest = places.shape[:-1]
    counted = [
        torch.arange(x.shape[at], device=x.device).reshape(
            [-1 if one == at else 1 for one in range(len(rest))]
        )
        for at in range(batch)
    ]
    given = [_positive(places[..., at], x.shape[batch + at]) for at in range(depth)]
    return (*counted, *given)


def _gather_nd(call: Call, x: Tensor, places: Tensor) -> Tensor:
    return x[_places_nd(x, places, call.get("batch_dims", 0))]


def _scatter_elements(call: Call, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    places = _positive(places, x.shape[axis])
    how = call.get("reduction", "none")
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[how], include_self=True)


def _scatter_nd(call: Call, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    how = call.get("reduction", "none")
    where = _places_nd(x, places, 0)
    if how == "none":
        return x.index_put(where, updates)
    if how == "add":
        return x.index_put(where, updates, accumulate=True)
    depth = places.shape[-1]
    rows = math.prod(x.shape[:depth])
    strides = [math.prod(x.shape[at + 1 : depth]) for at in range(depth)]
    flat = torch.stack([one * stride for one, stride in zip(where, strides, strict=True)]).sum(0).reshape(-1)
    inner = x.reshape(rows, -1)
    chosen = flat[:, None].expand(-1, inner.shape[1])
    found = inner.scatter_reduce(
        0, chosen, updates.reshape(chosen.shape), _REDUCTIONS[how], include_self=True
    )
    return found.reshape(x.shape)


def _tensor_scatter(call: Call, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    axis = call.get("axis", -2) % past.dim()
    size, length = past.shape[axis], update.shape[axis]
    begin = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device) if starts is None else starts
    places = begin[:, None] + torch.arange(length, device=past.device)
    places = places % size if call.get("mode", "linear") == "circular" else places
    shape = [1] * past.dim()
    shape[0], shape[axis] = past.shape[0], length
    return past.scatter(axis, places.reshape(shape).expand(update.shape), update)


OPERATORS: dict[str, Any] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
}
