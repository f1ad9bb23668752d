"""Convolution and pooling, with strides, dilations and padding; image interpolation, grids, regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.executor import OpCall, Operator
from torchrelay.models.onnx.importer.tensors import check_made
from torchrelay.records import dataclass

Numbers = list[Any] | None


def _resize(
    call: OpCall, x: Tensor, roi: Numbers = None, scales: Numbers = None, sizes: Any = None
) -> Tensor:
    if call.version < 11:  # scales were the second input, without half pixels
        return _upsample(call, x, roi)
    axes = [at % x.dim() for at in call.get("axes", range(x.dim()))]
    places = call.get("coordinate_transformation_mode", "half_pixel")
    if not scales and not sizes:
        raise call.fail("neither scales nor sizes are given")
    if sizes:
        scales = [size / x.shape[at] for at, size in zip(axes, sizes, strict=True)]
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = min(scales) if policy == "not_larger" else max(scales)
            scales, sizes = [one] * len(axes), [math.floor(one * x.shape[at] + 0.5) for at in axes]
    nearest = call.get("nearest_mode", "round_prefer_floor")
    return _resized(call, x, axes, scales or [], sizes or None, roi or None, places, nearest)


def _upsample(call: OpCall, x: Tensor, scales: Numbers = None) -> Tensor:
    factors = scales or list(call.get("scales", ()))
    return _resized(call, x, list(range(x.dim())), factors, None, None, "asymmetric", "floor")


def _resized(
    call: OpCall, x: Tensor, axes: list[int], factors: list[float], sizes: list[Any] | None,
    roi: list[float] | None, places: str, nearest: str,
) -> Tensor:  # fmt: skip
    if sizes is None:
        sizes = [math.floor(x.shape[at] * one) for at, one in zip(axes, factors, strict=True)]
    made = list(x.shape)
    for at, one in zip(axes, sizes, strict=True):
        made[at] = one
    check_made(str(call.node), made)
    outside = None
    dtype = x.dtype
    x = x if x.is_floating_point() else x.float()
    for at, (axis, factor, size) in enumerate(zip(axes, factors, sizes, strict=True)):
        if size == x.shape[axis] and factor == 1 and places != "tf_crop_and_resize":
            continue
        begin, end = (roi[at], roi[at + len(axes)]) if roi is not None else (0.0, 1.0)
        where = _places(places, size, x.shape[axis], factor, begin, end).to(x.device)
        if places == "tf_crop_and_resize":
            out = (where < 0) | (where > x.shape[axis] - 1)
            out = out.reshape([-1 if one == axis else 1 for one in range(x.dim())])
            outside = out if outside is None else outside | out
        mode, length = call.get("mode", "nearest"), x.shape[axis]
        if mode == "nearest":
            found = _NEAREST.get(nearest, lambda one: torch.ceil(one - 0.5))(where)
            x = x.index_select(axis, found.long().clamp(0, length - 1))
        else:
            squeeze = min(factor, 1.0) if call.get("antialias", 0) else 1.0
            reach = (1 if mode == "linear" else 2) / squeeze
            first = torch.floor(where - reach).long() + 1
            near = first[:, None] + torch.arange(math.ceil(2 * reach) + 1, device=x.device)
            distance = (where[:, None] - near) * squeeze
            a = call.get("cubic_coeff_a", -0.75)
            weights = (1 - distance.abs()).clamp(min=0) if mode == "linear" else _cubic(distance, a)
            inside = (near >= 0) & (near < length)
            if call.get("exclude_outside", 0):
                weights = torch.where(inside, weights, torch.zeros_like(weights))
            if call.get("exclude_outside", 0) or call.get("antialias", 0):
                weights = weights / weights.sum(1, keepdim=True)
            parts = x.index_select(axis, near.clamp(0, length - 1).reshape(-1))
            parts = parts.reshape(*x.shape[:axis], *near.shape, *x.shape[axis + 1 :])
            shape = [1] * parts.dim()
            shape[axis], shape[axis + 1] = near.shape
            x = (parts * weights.to(x.dtype).reshape(shape)).sum(axis + 1)
    if outside is not None:
        x = torch.where(outside, torch.tensor(call.get("extrapolation_value", 0.0), dtype=x.dtype), x)
    if not dtype.is_floating_point and call.get("mode", "nearest") != "nearest":
        x = x.round()
    return x.to(dtype)


def _places(mode: str, size: int, length: int, factor: float, begin: float, end: float) -> Tensor:
    """Return the position of each new element among the old ones."""
    at = torch.arange(size, dtype=torch.float64)
    if mode == "asymmetric":
        return at / factor
    if mode == "align_corners":
        return at * ((length - 1) / (factor * length - 1)) if factor * length > 1 else at * 0
    if mode == "pytorch_half_pixel":
        return (at + 0.5) / factor - 0.5 if size > 1 else at * 0
    if mode == "half_pixel_symmetric":
        shift = size / (factor * length)  # of the requested size
        return length / 2 * (1 - shift) + (at + 0.5) / factor - 0.5
    if mode == "tf_crop_and_resize":
        if size > 1:
            return begin * (length - 1) + at * (end - begin) * (length - 1) / (size - 1)
        return 0.5 * (begin + end) * (length - 1) + at * 0
    return (at + 0.5) / factor - 0.5


_NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_ceil": lambda where: torch.floor(where + 0.5),
}


def _cubic(x: Tensor, a: float) -> Tensor:
    """Return the weights of cubic convolution (Keys, 1981)."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _grid_sample(call: OpCall, x: Tensor, grid: Tensor) -> Tensor:
    mode, padding = call.get("mode", "bilinear"), call.get("padding_mode", "zeros")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if x.dim() == 5 and mode == "bicubic":
        raise call.fail("cubic sampling of volumes is not supported")
    return functional.grid_sample(x, grid.to(x.dtype), mode, padding, bool(call.get("align_corners", 0)))


def _roi_align(call: OpCall, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    """Compute means or maxima of samples in the cells of each region (He and others, 2017)."""
    height, width = call.get("output_height", 1), call.get("output_width", 1)
    default = "half_pixel" if call.version >= 16 else "output_half_pixel"
    shift = 0.5 if call.get("coordinate_transformation_mode", default) == "half_pixel" else 0.0
    scale, ratio = call.get("spatial_scale", 1.0), call.get("sampling_ratio", 0)
    found = []
    for roi, batch in zip(rois.tolist(), batches.tolist(), strict=True):
        left, top, right, bottom = (one * scale - shift for one in roi)
        wide, high = right - left, bottom - top
        if not shift:
            wide, high = max(wide, 1.0), max(high, 1.0)
        down = ratio if ratio > 0 else math.ceil(high / height)
        across = ratio if ratio > 0 else math.ceil(wide / width)
        check_made(str(call.node), [height, down, width, across, x.shape[1]])
        ys = top + (torch.arange(height * down, device=x.device) + 0.5) * (high / height / max(down, 1))
        xs = left + (torch.arange(width * across, device=x.device) + 0.5) * (wide / width / max(across, 1))
        cells = torch.stack(
            [one.reshape(-1, height, down, width, across) for one in _corners(x[batch], ys, xs)]
        )
        maxima = call.get("mode", "avg") == "max"  # the largest of the weighted corners, as in the standard
        found.append(cells.amax((0, 3, 5)) if maxima else cells.sum(0).mean((2, 4)))
    return torch.stack(found) if found else x.new_zeros((0, x.shape[1], height, width))


def _corners(image: Tensor, ys: Tensor, xs: Tensor) -> list[Tensor]:
    """Return the weighted four neighbours of each position; just outside is the border, beyond is 0."""
    h, w = image.shape[1:]
    inside = ((ys >= -1) & (ys <= h))[:, None] & ((xs >= -1) & (xs <= w))[None]
    ys, xs = ys.clamp(0, h - 1), xs.clamp(0, w - 1)
    y0, x0 = ys.floor().long().clamp(max=h - 1), xs.floor().long().clamp(max=w - 1)
    y1, x1 = (y0 + 1).clamp(max=h - 1), (x0 + 1).clamp(max=w - 1)
    fy, fx = (ys - y0)[:, None], (xs - x0)[None]
    return [
        image[:, rows][:, :, columns] * down * across * inside
        for rows, down in ((y0, 1 - fy), (y1, fy))
        for columns, across in ((x0, 1 - fx), (x1, fx))
    ]


def _bilinear(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """Sample `image` (n, c, h, w) at `ys`, `xs` (n, a, b) as (n, c, a, b), 0 outside."""
    y0, x0 = torch.floor(ys), torch.floor(xs)
    found = torch.zeros((), dtype=image.dtype, device=image.device)
    for y, x in ((y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1)):
        weight = (1 - (ys - y).abs()) * (1 - (xs - x).abs())
        # Pixels of `image` (n, c, h, w) at integer positions (n, a, b) as (n, c, a, b), 0 outside.
        rows, columns = y.long(), x.long()
        n, c, h, w = image.shape
        inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
        flat = (rows.clamp(0, h - 1) * w + columns.clamp(0, w - 1)).reshape(n, 1, -1).expand(n, c, -1)
        pixels = image.reshape(n, c, h * w).gather(2, flat).reshape(n, c, *rows.shape[1:])
        found = found + (pixels * inside.unsqueeze(1).to(pixels.dtype)) * weight.unsqueeze(1)
    return found


def _affine_grid(call: OpCall, theta: Tensor, size: list[int]) -> Tensor:
    check_made(str(call.node), [*size, 3])
    return functional.affine_grid(theta, size, bool(call.get("align_corners", 0)))


@dataclass(frozen=True)
class PoolWindows:
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


def _windows_of(call: OpCall, sizes: Sequence[Any], kernel: Sequence[int]) -> PoolWindows:
    """Return the windows of a convolution or pooling over an input with these spatial sizes."""
    rank = len(kernel)
    strides = tuple(call.get("strides", (1,) * rank))
    dilations = tuple(call.get("dilations", (1,) * rank))
    if any(one < 1 for one in (*kernel, *strides, *dilations)) or not len(strides) == len(dilations) == rank:
        raise call.fail("sizes, strides and dilations of windows must be at least 1, one per dimension")
    windows = PoolWindows(tuple(kernel), strides, dilations, (0,) * rank, (0,) * rank)
    mode = call.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // stride) - 1) * stride + span - size, 0)
            for size, stride, span in zip(sizes, strides, windows.spans(), strict=True)
        ]
        small, large = tuple(one // 2 for one in totals), tuple(one - one // 2 for one in totals)
        pads = (*small, *large) if mode == "SAME_UPPER" else (*large, *small)
    else:
        pads = tuple(call.get("pads", (0,) * (2 * rank))) if mode == "NOTSET" else (0,) * (2 * rank)
    if len(pads) != 2 * rank or any(type(one) is int and one < 0 for one in pads):
        raise call.fail(f"pads {pads} are not two numbers per dimension, for {rank} dimensions")
    return replace(windows, before=pads[:rank], after=pads[rank:])


def padded(x: Tensor, before: Sequence[Any], after: Sequence[Any], value: float = 0.0) -> Tensor:
    """Pad the spatial dimensions of `x`."""
    widths = [one for pair in zip(reversed(before), reversed(after), strict=True) for one in pair]
    return functional.pad(x, widths, value=value) if any(type(one) is not int or one for one in widths) else x


def _by_rank(call: OpCall, kernel: str, x: Tensor) -> Callable[..., Tensor]:
    """Return torch's function of this name for the input's number of dimensions."""
    if not 1 <= x.dim() - 2 <= 3:
        raise call.fail(f"an input of {x.dim()} dimensions; expected 1 to 3 spatial dimensions")
    return getattr(functional, f"{kernel}{x.dim() - 2}d")  # type: ignore[no-any-return]


def convolved(call: OpCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the convolution described by the attributes of the call."""
    run = _by_rank(call, "conv", x)
    windows = _windows_of(call, x.shape[2:], call.get("kernel_shape", weight.shape[2:]))
    groups = call.get("group", 1)
    around: Any = windows.before
    if windows.before != windows.after:
        x, around = padded(x, windows.before, windows.after), 0
    return run(x, weight, bias, windows.strides, around, windows.dilations, groups)


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
    windows = _windows_of(call, x.shape[2:], weight.shape[2:])
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
    taken = _bilinear(source, ys.reshape(flat), xs.reshape(flat)).reshape(
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


def _counts(call: OpCall, sizes: Any, windows: PoolWindows) -> tuple[int, ...]:
    """Count windows per dimension; ceil_mode adds one that begins inside and extends outside."""
    found = []
    for at, (size, span, stride) in enumerate(zip(sizes, windows.spans(), windows.strides, strict=True)):
        wide = size + windows.before[at] + windows.after[at]
        count = (wide - span) // stride + 1
        sticks_out = call.get("ceil_mode", 0) and (wide - span) % stride
        found.append(count + bool(sticks_out and count * stride < size + windows.before[at]))
    return tuple(found)


def _views(x: Tensor, windows: PoolWindows, counts: tuple[int, ...], value: float) -> Tensor:
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
    windows = _windows_of(call, x.shape[2:], call.need("kernel_shape"))
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
    windows = _windows_of(call, x.shape[2:], call.need("kernel_shape"))
    outside = bool(call.get("count_include_pad", 0))
    plain = all(one == 1 for one in windows.dilations) and not any(windows.before) and not any(windows.after)
    if plain and not call.get("ceil_mode", 0) and x.dim() <= 5:
        return _by_rank(call, "avg_pool", x)(x, windows.kernel, windows.strides)
    counts = _counts(call, x.shape[2:], windows)
    total = _views(x, windows, counts, 0).sum(-1)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if outside:  # padding of the file counts, the part outside of it does not
        ones = padded(ones, windows.before, windows.after, 1.0)
        windows = replace(windows, before=(0,) * len(counts), after=(0,) * len(counts))
    return total / _views(ones, windows, counts, 0).sum(-1)


def _lp_pool(call: OpCall, x: Tensor) -> Tensor:
    windows = _windows_of(call, x.shape[2:], call.need("kernel_shape"))
    counts, p = _counts(call, x.shape[2:], windows), call.get("p", 2)
    return _views(x, windows, counts, 0).abs().pow(p).sum(-1).pow(1 / p)


def _max_unpool(call: OpCall, x: Tensor, places: Tensor, shape: list[Any] | None = None) -> Tensor:
    kernel = call.need("kernel_shape")
    windows = _windows_of(call, x.shape[2:], kernel)
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


OPERATORS: dict[str, Any] = {
    "Resize": Operator(_resize, ints=(3,), numbers=(1, 2)),
    "Upsample": Operator(_upsample, numbers=(1,)),
    "GridSample": _grid_sample,
    "AffineGrid": Operator(_affine_grid, ints=(1,)),
    "RoiAlign": _roi_align,
    "Conv": convolved,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "Col2Im": Operator(_col2im, ints=(1, 2)),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalMaxPool": lambda call, x: x.amax(list(range(2, x.dim())), keepdim=True),
    "GlobalAveragePool": lambda call, x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalLpPool": lambda call, x: torch.linalg.vector_norm(
        x, call.get("p", 2), list(range(2, x.dim())), keepdim=True
    ),
    "MaxUnpool": Operator(_max_unpool, ints=(2,)),
    "MaxRoiPool": _roi_pool,
}
