"""Gathering and scattering by places, and operators that choose elements by what they hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.models.onnx.importer.operator import OpCall, Operator

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _positive(places: Tensor, size: Any) -> Tensor:
    places = places.to(torch.int64)
    return torch.where(places < 0, places + size, places)


def _gather(call: OpCall, x: Tensor, places: Tensor) -> Tensor:
    axis = call.get("axis", 0) % x.dim()
    flat = _positive(places, x.shape[axis])
    if axis == 0:  # as an embedding looks up its rows
        rows = x.dim() == 2 and x.is_floating_point()
        return torch.nn.functional.embedding(flat, x) if rows else x[flat]
    if places.dim() == 0:
        return x.index_select(axis, flat.reshape(1)).squeeze(axis)
    found = x.index_select(axis, flat.reshape(-1))
    return found.reshape(x.shape[:axis] + tuple(flat.shape) + x.shape[axis + 1 :])


def _places_nd(x: Tensor, places: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Index tensors for the leading dimensions of `x`: `batch` by counting, the others by `places`."""
    rest = range(places.dim() - 1)
    counted = [
        torch.arange(x.shape[at], device=x.device).reshape([-1 if one == at else 1 for one in rest])
        for at in range(batch)
    ]
    given = [_positive(places[..., at], x.shape[batch + at]) for at in range(places.shape[-1])]
    return (*counted, *given)


def _scatter_elements(call: OpCall, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    places = _positive(places, x.shape[axis])
    how = call.get("reduction", "none")
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[how], include_self=True)


def _scatter_nd(call: OpCall, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    how = call.get("reduction", "none")
    where = _places_nd(x, places, 0)
    if how in ("none", "add"):
        return x.index_put(where, updates, accumulate=how == "add")
    depth = places.shape[-1]
    rows = math.prod(x.shape[:depth])
    strides = [math.prod(x.shape[at + 1 : depth]) for at in range(depth)]
    flat = torch.stack([one * stride for one, stride in zip(where, strides, strict=True)]).sum(0).reshape(-1)
    inner = x.reshape(rows, -1)
    chosen = flat[:, None].expand(-1, inner.shape[1])
    updates = updates.reshape(chosen.shape)
    return inner.scatter_reduce(0, chosen, updates, _REDUCTIONS[how], include_self=True).reshape(x.shape)


def _tensor_scatter(call: OpCall, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    axis = call.get("axis", -2) % past.dim()
    size, length = past.shape[axis], update.shape[axis]
    begin = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device) if starts is None else starts
    places = begin[:, None] + torch.arange(length, device=past.device)
    places = places % size if call.get("mode", "linear") == "circular" else places
    shape = [1] * past.dim()
    shape[0], shape[axis] = past.shape[0], length
    return past.scatter(axis, places.reshape(shape).expand(update.shape), update)


def _top_k(call: OpCall, x: Tensor, k: list[int] | None = None) -> tuple[Tensor, Tensor]:
    axis, largest = call.get("axis", -1), bool(call.get("largest", 1))
    count = call.get("k") if k is None else k[0]
    wide = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
    order = torch.sort(wide, dim=axis, descending=largest, stable=True)  # of equals the first
    return order.values.narrow(axis, 0, count).to(x.dtype), order.indices.narrow(axis, 0, count)


def _compress(call: OpCall, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, condition.reshape(-1).nonzero().reshape(-1))


def _unique(call: OpCall, x: Tensor) -> tuple[Tensor, ...]:
    axis = call.get("axis")
    rows = x.reshape(-1, 1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)
    _, inverse, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    size = counts.shape[0]
    places = torch.arange(rows.shape[0], device=x.device)
    first = torch.full((size,), rows.shape[0], device=x.device).scatter_reduce(0, inverse, places, "amin")
    if not call.get("sorted", 1):
        order = torch.argsort(first)
        back = torch.empty_like(order).scatter(0, order, torch.arange(size, device=x.device))
        first, counts, inverse = first[order], counts[order], back[inverse]
    values = x.reshape(-1)[first] if axis is None else x.index_select(axis, first)
    return values, first, inverse, counts


def _suppress(
    call: OpCall,
    boxes: Tensor,
    scores: Tensor,
    most: list[int] | None = None,
    overlap: Any = None,
    least: Any = None,
) -> Tensor:
    """The best boxes of each class, without those that overlap a better one."""
    limit = most[0] if most else 0
    share = 0.0 if overlap is None else float(overlap)
    floor = None if least is None else float(least)
    if call.get("center_point_box", 0):
        half = boxes[..., 2:] / 2
        corners = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    else:
        low = torch.minimum(boxes[..., :2], boxes[..., 2:])
        corners = torch.cat([low, torch.maximum(boxes[..., :2], boxes[..., 2:])], -1)
    found: list[tuple[int, int, int]] = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            chosen = _best(corners[batch], scores[batch, kind], limit, share, floor)
            found += [(batch, kind, one) for one in chosen]
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _best(corners: Tensor, scores: Tensor, limit: int, share: float, least: float | None) -> list[int]:
    order = torch.sort(scores, descending=True, stable=True).indices
    if least is not None:
        order = order[scores[order] > least]
    chosen: list[int] = []
    while order.numel() and len(chosen) < limit:
        first, order = order[0], order[1:]
        chosen.append(int(first))
        order = order[_overlaps(corners[first], corners[order]) <= share]
    return chosen


def _overlaps(one: Tensor, others: Tensor) -> Tensor:
    """Area in common by area of both together."""
    sides = torch.minimum(one[2:], others[:, 2:]) - torch.maximum(one[:2], others[:, :2])
    common = sides.clamp(min=0).prod(1)
    areas = (others[:, 2:] - others[:, :2]).prod(1) + (one[2:] - one[:2]).prod()
    return common / (areas - common)


def _gather_elements(call: OpCall, x: Tensor, places: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    return torch.gather(x, axis, _positive(places, x.shape[axis]))


OPERATORS: dict[str, Any] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": lambda call, x, places: x[_places_nd(x, places, call.get("batch_dims", 0))],
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "TopK": Operator(_top_k, ints=(1,)),
    "Compress": _compress,
    "NonZero": lambda call, x: x.nonzero().t() if x.dim() else (x.reshape(1) != 0).nonzero()[:, :0].t(),
    "Unique": _unique,
    "NonMaxSuppression": Operator(_suppress, ints=(2,)),
}
