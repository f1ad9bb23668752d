"""Operators that choose elements: what comes out has a size that depends on the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.ops.operator import Operator


def _top_k(call: Call, x: Tensor, k: list[int] | None = None) -> tuple[Tensor, Tensor]:
    axis, largest = call.get("axis", -1), bool(call.get("largest", 1))
    count = call.get("k") if k is None else k[0]
    wide = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
    order = torch.sort(wide, dim=axis, descending=largest, stable=True)  # of equals the first
    return order.values.narrow(axis, 0, count).to(x.dtype), order.indices.narrow(axis, 0, count)


def _compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, condition.reshape(-1).nonzero().reshape(-1))


def _non_zero(call: Call, x: Tensor) -> Tensor:
    return x.nonzero().t() if x.dim() else (x.reshape(1) != 0).nonzero()[:, :0].t()


def _unique(call: Call, x: Tensor) -> tuple[Tensor, ...]:
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
    call: Call,
    boxes: Tensor,
    scores: Tensor,
    most: list[int] | None = None,
    overlap: Any = None,
    least: Any = None,
) -> Tensor:
    """The best boxes of each class, without those that overlap a better one."""
    limit = most[0] if most else 0
    share = float(overlap) if overlap is not None else 0.0
    if call.get("center_point_box", 0):
        half = boxes[..., 2:] / 2
        corners = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    else:
        low = torch.minimum(boxes[..., :2], boxes[..., 2:])
        corners = torch.cat([low, torch.maximum(boxes[..., :2], boxes[..., 2:])], -1)
    found: list[tuple[int, int, int]] = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            chosen = _best(
                corners[batch], scores[batch, kind], limit, share, None if least is None else float(least)
            )
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


OPERATORS: dict[str, Any] = {
    "TopK": Operator(_top_k, ints=(1,)),
    "Compress": _compress,
    "NonZero": _non_zero,
    "Unique": _unique,
    "NonMaxSuppression": Operator(_suppress, ints=(2,)),
}
