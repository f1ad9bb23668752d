"""Poolings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.limits import check_made
from torchrelay.models.onnx.importer.operator import Call, Operator
from torchrelay.models.onnx.importer.ops.conv import Windows, padded, windows_of

_MAX: dict[int, Callable[..., Any]] = {
    1: functional.max_pool1d,
    2: functional.max_pool2d,
    3: functional.max_pool3d,
}
_AVERAGE: dict[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}


def _counts(call: Call, sizes: Any, windows: Windows) -> tuple[int, ...]:
    """Windows per dimension; with ceil_mode one more that begins inside and sticks out."""
    found = []
    for at, (size, span, stride) in enumerate(zip(sizes, windows.spans(), windows.strides, strict=True)):
        wide = size + windows.before[at] + windows.after[at]
        count = (wide - span) // stride + 1
        if call.get("ceil_mode", 0) and (wide - span) % stride:
            starts_inside = count * stride < size + windows.before[at]
            count += starts_inside
        found.append(count)
    return tuple(found)


def _widened(x: Tensor, windows: Windows, counts: tuple[int, ...], value: float) -> Tensor:
    """With all that the windows reach over: what the file adds, and what sticks out."""
    after = [
        max((count - 1) * stride + span - size - before, 0)
        for count, stride, span, size, before in zip(
            counts, windows.strides, windows.spans(), x.shape[2:], windows.before, strict=True
        )
    ]
    return padded(x, windows.before, after, value)


def _views(x: Tensor, windows: Windows, counts: tuple[int, ...]) -> Tensor:
    """The windows as a last dimension: n, c, *counts, elements of a window."""
    for at, (span, stride) in enumerate(zip(windows.spans(), windows.strides, strict=True)):
        x = x.unfold(at + 2, span, stride).narrow(at + 2, 0, counts[at])
    rank = len(counts)
    for at, dilation in enumerate(windows.dilations):
        inner = [slice(None, None, dilation if one == at else 1) for one in range(rank)]
        x = x[(slice(None),) * (2 + rank) + tuple(inner)]
    return x.reshape(*x.shape[: 2 + rank], -1)


def _max_pool(call: Call, x: Tensor) -> Any:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    fits = windows.even and all(
        type(one) is int and one <= size // 2
        for one, size in zip(windows.before, windows.kernel, strict=True)
    )
    if (
        fits
        and call.outputs == 1
        and not call.get("ceil_mode", 0)
        and x.is_floating_point()
        and x.dim() - 2 in _MAX
    ):
        return _MAX[x.dim() - 2](x, windows.kernel, windows.strides, windows.before, windows.dilations)
    counts = _counts(call, x.shape[2:], windows)
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    best = _views(_widened(x, windows, counts, low), windows, counts).max(-1)
    if call.outputs == 1:
        return best.values
    places = torch.arange(math.prod(x.shape), device=x.device).reshape(x.shape)
    if call.get("storage_order", 0):
        column = torch.arange(math.prod(x.shape[2:]), device=x.device).reshape(tuple(x.shape[2:])[::-1])
        planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(
            *x.shape[:2], *(1,) * (x.dim() - 2)
        )
        places = planes * math.prod(x.shape[2:]) + column.permute(*reversed(range(column.dim())))
    seen = _views(_widened(places, windows, counts, -1), windows, counts)
    return best.values, seen.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1)


def _average_pool(call: Call, x: Tensor) -> Tensor:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    outside = bool(call.get("count_include_pad", 0))
    plain = all(one == 1 for one in windows.dilations) and not any(windows.before) and not any(windows.after)
    if plain and not call.get("ceil_mode", 0) and x.dim() - 2 in _AVERAGE:
        return _AVERAGE[x.dim() - 2](x, windows.kernel, windows.strides)
    counts = _counts(call, x.shape[2:], windows)
    total = _views(_widened(x, windows, counts, 0), windows, counts).sum(-1)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if outside:  # what the file adds counts, what sticks out does not
        ones = padded(ones, windows.before, windows.after, 1.0)
        windows = Windows(
            windows.kernel, windows.strides, windows.dilations, (0,) * len(counts), (0,) * len(counts)
        )
    return total / _views(_widened(ones, windows, counts, 0), windows, counts).sum(-1)


def _lp_pool(call: Call, x: Tensor) -> Tensor:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    counts, p = _counts(call, x.shape[2:], windows), call.get("p", 2)
    return _views(_widened(x, windows, counts, 0), windows, counts).abs().pow(p).sum(-1).pow(1 / p)


def _global_max(call: Call, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


def _global_average(call: Call, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


def _global_lp(call: Call, x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, call.get("p", 2), list(range(2, x.dim())), keepdim=True)
    return found


def _max_unpool(call: Call, x: Tensor, places: Tensor, shape: list[Any] | None = None) -> Tensor:
    kernel = call.need("kernel_shape")
    windows = windows_of(call, x.shape[2:], kernel)
    implied = [
        (size - 1) * stride + span - before - after
        for size, stride, span, before, after in zip(
            x.shape[2:], windows.strides, windows.kernel, windows.before, windows.after, strict=True
        )
    ]
    small = (*x.shape[:2], *implied)
    flat = torch.zeros(math.prod(small), dtype=x.dtype, device=x.device)
    flat = flat.scatter(0, places.reshape(-1), x.reshape(-1))
    found = flat.reshape(small)
    if shape is None:
        return found
    check_made(str(call.node), shape)
    return padded(
        found, [0] * len(kernel), [want - have for want, have in zip(shape[2:], small[2:], strict=True)]
    )


def _roi_pool(call: Call, x: Tensor, rois: Tensor) -> Tensor:
    """Maxima over the cells of each region (Girshick, 2015)."""
    height, width = call.need("pooled_shape")
    scale = call.get("spatial_scale", 1.0)
    found = []
    for batch, *corners in rois.tolist():
        left, top, right, bottom = (round(one * scale) for one in corners)
        high, wide = max(bottom - top + 1, 1), max(right - left + 1, 1)
        cells = []
        for i in range(height):
            for j in range(width):
                ys = [
                    min(max(top + f(k * high / height), 0), x.shape[2])
                    for k, f in ((i, math.floor), (i + 1, math.ceil))
                ]
                xs = [
                    min(max(left + f(k * wide / width), 0), x.shape[3])
                    for k, f in ((j, math.floor), (j + 1, math.ceil))
                ]
                cell = x[int(batch), :, ys[0] : ys[1], xs[0] : xs[1]].flatten(1)
                cells.append(cell.amax(1) if cell.numel() else x.new_zeros(x.shape[1]))
        found.append(torch.stack(cells, 1).reshape(x.shape[1], height, width))
    return torch.stack(found) if found else x.new_zeros((0, x.shape[1], height, width))


OPERATORS: dict[str, Any] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalMaxPool": _global_max,
    "GlobalAveragePool": _global_average,
    "GlobalLpPool": _global_lp,
    "MaxUnpool": Operator(_max_unpool, ints=(2,)),
    "MaxRoiPool": _roi_pool,
}
