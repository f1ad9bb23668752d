"""Convolution and pooling operators, with their windows: strides, dilations, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.operator import OpCall, Operator
from torchrelay.models.onnx.importer.ops.resize import bilinear
from torchrelay.models.onnx.importer.tensors import check_made
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Windows:
    """Window size, stride, dilation and padding per spatial dimension."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    def spans(self) -> tuple[int, ...]:
        """Extents of a window in elements."""
        return tuple(
            (size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )


def windows_of(call: OpCall, sizes: Sequence[Any], kernel: Sequence[int]) -> Windows:
    """Return the windows of a convolution or pooling over an input with these spatial sizes."""
    rank = len(kernel)
    strides = tuple(call.get("strides", (1,) * rank))
    dilations = tuple(call.get("dilations", (1,) * rank))
    windows = Windows(tuple(kernel), strides, dilations, (0,) * rank, (0,) * rank)
    if any(one < 1 for one in (*kernel, *strides, *dilations)) or not len(strides) == len(dilations) == rank:
        raise call.fail("sizes, strides and dilations of windows must be at least 1, one per dimension")
    mode = call.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // stride) - 1) * stride + span - size, 0)
            for size, stride, span in zip(sizes, strides, windows.spans(), strict=True)
        ]
        small, large = tuple(one // 2 for one in totals), tuple(one - one // 2 for one in totals)
        before, after = (small, large) if mode == "SAME_UPPER" else (large, small)
        return replace(windows, before=before, after=after)
    pads = tuple(call.get("pads", (0,) * (2 * rank))) if mode == "NOTSET" else (0,) * (2 * rank)
    if len(pads) != 2 * rank or any(type(one) is int and one < 0 for one in pads):
        raise call.fail(f"pads {pads} are not two numbers per dimension, for {rank} dimensions")
    return replace(windows, before=pads[:rank], after=pads[rank:])


def padded(x: Tensor, before: Sequence[Any], after: Sequence[Any], value: float = 0.0) -> Tensor:
    """Pad the spatial dimensions of `x`."""
    widths = [one for pair in zip(reversed(before), reversed(after), strict=True) for one in pair]
    return functional.pad(x, widths, value=value) if any(type(one) is not int or one for one in widths) else x


def _by_rank(call: OpCall, kernel: str, x: Tensor) -> Any:
    """Return torch's function of this name for the input's number of dimensions."""
    if not 1 <= x.dim() - 2 <= 3:
        raise call.fail(f"an input of {x.dim()} dimensions; expected 1 to 3 spatial dimensions")
    return getattr(functional, f"{kernel}{x.dim() - 2}d")


def convolved(call: OpCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the convolution described by the attributes of the call."""
    run = _by_rank(call, "conv", x)
    windows = windows_of(call, x.shape[2:], call.get("kernel_shape", weight.shape[2:]))
    groups = call.get("group", 1)
    around: Any = windows.before
    if windows.before != windows.after:
        x, around = padded(x, windows.before, windows.after), 0
    found: Tensor = run(x, weight, bias, windows.strides, around, windows.dilations, groups)
    return found


def _conv_transpose(call: OpCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    run = _by_rank(call, "conv_transpose", x)
    rank = x.dim() - 2
    strides, dilations = call.get("strides", (1,) * rank), call.get("dilations", (1,) * rank)
    more = call.get("output_padding", (0,) * rank)
    spans = [(size - 1) * one + 1 for size, one in zip(weight.shape[2:], dilations, strict=True)]
    full = [(size - 1) * step + span + extra for size, step, span, extra in zip(
        x.shape[2:], strides, spans, more, strict=True)]  # fmt: skip
    before, after = _cut(call, x, full, strides)
    whole = run(x, weight, None, strides, 0, 0, call.get("group", 1), dilations)
    missing = [size - have for size, have in zip(full, whole.shape[2:], strict=True)]
    whole = padded(whole, [0] * rank, missing)
    whole = padded(whole, [-one for one in before], [-one for one in after])  # less padding if it is cut
    return whole if bias is None else whole + bias.reshape(-1, *(1,) * rank)


def _cut(call: OpCall, x: Tensor, full: list[Any], strides: Any) -> tuple[list[Any], list[Any]]:
    """Return how much of the full result is cut at each side."""
    rank, mode = x.dim() - 2, call.get("auto_pad", "NOTSET")
    if call.has("output_shape"):
        shape = list(call.get("output_shape"))[-rank:]
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        shape = [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
    else:
        pads = call.get("pads", (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
        return list(pads[:rank]), list(pads[rank:])
    total = [size - wanted for size, wanted in zip(full, shape, strict=True)]
    small = [one // 2 for one in total]
    large = [one - less for one, less in zip(total, small, strict=True)]
    return (small, large) if mode == "SAME_UPPER" else (large, small)


def _deform_conv(
    call: OpCall,
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Deformable convolution with `offset` and `mask` (Zhu and others, 2019)."""
    if x.dim() != 4:
        raise call.fail("only two spatial dimensions are supported")
    n, channels = x.shape[:2]
    windows = windows_of(call, x.shape[2:], weight.shape[2:])
    parts, groups = call.get("offset_group", 1), call.get("group", 1)
    kh, kw = windows.kernel
    oh, ow = offset.shape[2:]
    moved = offset.reshape(n, parts, kh * kw, 2, oh, ow)
    rows, columns = (
        (torch.arange(out, device=x.device) * windows.strides[at] - windows.before[at])
        for at, out in ((0, oh), (1, ow))
    )
    inner = [(i * windows.dilations[0], j * windows.dilations[1]) for i in range(kh) for j in range(kw)]
    down = torch.tensor([one for one, _ in inner], device=x.device)[:, None, None] + rows[:, None]
    right = torch.tensor([one for _, one in inner], device=x.device)[:, None, None] + columns[None]
    ys, xs = moved[:, :, :, 0] + down, moved[:, :, :, 1] + right  # n, parts, kh*kw, oh, ow
    source = x.reshape(n * parts, channels // parts, *x.shape[2:])
    flat = (n * parts, kh * kw * oh, ow)
    taken = bilinear(source, ys.reshape(flat), xs.reshape(flat)).reshape(
        n, parts, channels // parts, kh * kw, oh, ow
    )
    if mask is not None:
        taken = taken * mask.reshape(n, parts, 1, kh * kw, oh, ow)
    columns_of = taken.reshape(n, groups, channels // groups * kh * kw, oh * ow)
    kernel = weight.reshape(groups, weight.shape[0] // groups, -1)
    found = torch.einsum("gok,ngkp->ngop", kernel, columns_of).reshape(n, -1, oh, ow)
    return found if bias is None else found + bias.reshape(-1, 1, 1)


def _col2im(call: OpCall, x: Tensor, image: list[Any], block: list[Any]) -> Tensor:
    rank = len(block)
    strides, dilations = call.get("strides", (1,) * rank), call.get("dilations", (1,) * rank)
    pads = call.get("pads", (0,) * 2 * rank)
    wide = [size + pads[at] + pads[at + rank] for at, size in enumerate(image)]
    counts = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, dilation, kernel, stride in zip(
        wide, dilations, block, strides, strict=True)]  # fmt: skip
    n, channels = x.shape[0], x.shape[1] // math.prod(block)
    places = torch.zeros((1, 1), dtype=torch.int64, device=x.device)  # window element x block
    for size, dilation, kernel, stride, count in zip(wide, dilations, block, strides, counts, strict=True):
        inner, outer = (torch.arange(one, device=x.device) for one in (kernel, count))
        one = inner[:, None] * dilation + outer * stride
        places = places[:, None, :, None] * size + one[None, :, None, :]
        places = places.reshape(places.shape[0] * kernel, -1)
    flat = torch.zeros(n, channels, math.prod(wide), dtype=x.dtype, device=x.device)
    flat = flat.index_add(2, places.reshape(-1), x.reshape(n, channels, -1))
    less = [-one for one in pads]
    return padded(flat.reshape(n, channels, *wide), less[:rank], less[rank:])


def _counts(call: OpCall, sizes: Any, windows: Windows) -> tuple[int, ...]:
    """Count windows per dimension; ceil_mode adds one that begins inside and extends outside."""
    found = []
    for at, (size, span, stride) in enumerate(zip(sizes, windows.spans(), windows.strides, strict=True)):
        wide = size + windows.before[at] + windows.after[at]
        count = (wide - span) // stride + 1
        sticks_out = call.get("ceil_mode", 0) and (wide - span) % stride
        found.append(count + bool(sticks_out and count * stride < size + windows.before[at]))
    return tuple(found)


def _views(x: Tensor, windows: Windows, counts: tuple[int, ...], value: float) -> Tensor:
    """Return windows as the last dimension: n, c, *counts, window elements; `value` outside."""
    ends = [(count - 1) * step + span for count, step, span in zip(
        counts, windows.strides, windows.spans(), strict=True)]  # fmt: skip
    after = [max(end - size - before, 0) for end, size, before in zip(
        ends, x.shape[2:], windows.before, strict=True)]  # fmt: skip
    x = padded(x, windows.before, after, value)
    for at, (span, stride) in enumerate(zip(windows.spans(), windows.strides, strict=True)):
        x = x.unfold(at + 2, span, stride).narrow(at + 2, 0, counts[at])
    rank = len(counts)
    for at, dilation in enumerate(windows.dilations):
        inner = [slice(None, None, dilation if one == at else 1) for one in range(rank)]
        x = x[(slice(None),) * (2 + rank) + tuple(inner)]
    return x.reshape(*x.shape[: 2 + rank], -1)


def _max_pool(call: OpCall, x: Tensor) -> Any:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    even = windows.before == windows.after and all(
        type(one) is int and one <= size // 2
        for one, size in zip(windows.before, windows.kernel, strict=True)
    )
    plain = call.outputs == 1 and not call.get("ceil_mode", 0) and x.is_floating_point() and x.dim() <= 5
    if even and plain:
        run = _by_rank(call, "max_pool", x)
        return run(x, windows.kernel, windows.strides, windows.before, windows.dilations)
    counts = _counts(call, x.shape[2:], windows)
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    best = _views(x, windows, counts, low).max(-1)
    if call.outputs == 1:
        return best.values
    places = torch.arange(math.prod(x.shape), device=x.device).reshape(x.shape)
    if call.get("storage_order", 0):
        column = torch.arange(math.prod(x.shape[2:]), device=x.device).reshape(tuple(x.shape[2:])[::-1])
        planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(
            *x.shape[:2], *(1,) * (x.dim() - 2)
        )
        places = planes * math.prod(x.shape[2:]) + column.permute(*reversed(range(column.dim())))
    seen = _views(places, windows, counts, -1)
    return best.values, seen.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1)


def _average_pool(call: OpCall, x: Tensor) -> Tensor:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    outside = bool(call.get("count_include_pad", 0))
    plain = all(one == 1 for one in windows.dilations) and not any(windows.before) and not any(windows.after)
    if plain and not call.get("ceil_mode", 0) and x.dim() <= 5:
        found: Tensor = _by_rank(call, "avg_pool", x)(x, windows.kernel, windows.strides)
        return found
    counts = _counts(call, x.shape[2:], windows)
    total = _views(x, windows, counts, 0).sum(-1)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if outside:  # padding of the file counts, the part outside of it does not
        ones = padded(ones, windows.before, windows.after, 1.0)
        windows = replace(windows, before=(0,) * len(counts), after=(0,) * len(counts))
    return total / _views(ones, windows, counts, 0).sum(-1)


def _lp_pool(call: OpCall, x: Tensor) -> Tensor:
    windows = windows_of(call, x.shape[2:], call.need("kernel_shape"))
    counts, p = _counts(call, x.shape[2:], windows), call.get("p", 2)
    return _views(x, windows, counts, 0).abs().pow(p).sum(-1).pow(1 / p)


def _max_unpool(call: OpCall, x: Tensor, places: Tensor, shape: list[Any] | None = None) -> Tensor:
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


def _cell(at: int, begin: int, length: int, count: int, most: int) -> slice:
    """Return the elements of one of the `count` cells of a region."""
    edges = (math.floor(at * length / count), math.ceil((at + 1) * length / count))
    return slice(*(min(max(begin + edge, 0), most) for edge in edges))


def _roi_pool(call: OpCall, x: Tensor, rois: Tensor) -> Tensor:
    """Compute maxima over the cells of each region (Girshick, 2015)."""
    height, width = call.need("pooled_shape")
    scale = call.get("spatial_scale", 1.0)
    found = []
    for batch, *corners in rois.tolist():
        left, top, right, bottom = (round(one * scale) for one in corners)
        high, wide = max(bottom - top + 1, 1), max(right - left + 1, 1)
        cells = []
        for i in range(height):
            for j in range(width):
                rows = _cell(i, top, high, height, x.shape[2])
                columns = _cell(j, left, wide, width, x.shape[3])
                cell = x[int(batch), :, rows, columns].flatten(1)
                cells.append(cell.amax(1) if cell.numel() else x.new_zeros(x.shape[1]))
        found.append(torch.stack(cells, 1).reshape(x.shape[1], height, width))
    return torch.stack(found) if found else x.new_zeros((0, x.shape[1], height, width))


def _overall(reduce: Callable[[OpCall, Tensor, list[int]], Tensor]) -> Callable[..., Tensor]:
    return lambda call, x: reduce(call, x, list(range(2, x.dim())))


OPERATORS: dict[str, Any] = {
    "Conv": convolved,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "Col2Im": Operator(_col2im, ints=(1, 2)),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalMaxPool": _overall(lambda call, x, axes: x.amax(axes, keepdim=True)),
    "GlobalAveragePool": _overall(lambda call, x, axes: x.mean(axes, keepdim=True)),
    "GlobalLpPool": _overall(
        lambda call, x, axes: torch.linalg.vector_norm(x, call.get("p", 2), axes, keepdim=True)
    ),
    "MaxUnpool": Operator(_max_unpool, ints=(2,)),
    "MaxRoiPool": _roi_pool,
}
