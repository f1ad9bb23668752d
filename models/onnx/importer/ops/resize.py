"""Image interpolation: Resize and Upsample, grids, regions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.operator import OpCall, Operator
from torchrelay.models.onnx.importer.tensors import check_made

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
        x = _along(call, x, axis, where, factor, nearest)
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


def _along(call: OpCall, x: Tensor, axis: int, where: Tensor, factor: float, nearest: str) -> Tensor:
    mode, length = call.get("mode", "nearest"), x.shape[axis]
    if mode == "nearest":
        found = _NEAREST.get(nearest, lambda one: torch.ceil(one - 0.5))(where)
        return x.index_select(axis, found.long().clamp(0, length - 1))
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
    return (parts * weights.to(x.dtype).reshape(shape)).sum(axis + 1)


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
        cells = _aligned(x[batch], ys, xs, call.get("mode", "avg") == "max", (height, down, width, across))
        found.append(cells)
    return torch.stack(found) if found else x.new_zeros((0, x.shape[1], height, width))


def _aligned(image: Tensor, ys: Tensor, xs: Tensor, maxima: bool, shape: tuple[int, int, int, int]) -> Tensor:
    corners = _corners(image, ys, xs)
    cells = [one.reshape(image.shape[0], *shape) for one in corners]
    if maxima:  # the largest of the weighted corners, as in the standard
        return torch.stack(cells).amax((0, 3, 5))
    return torch.stack(cells).sum(0).mean((2, 4))


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


def bilinear(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """Sample `image` (n, c, h, w) at `ys`, `xs` (n, a, b) as (n, c, a, b), 0 outside."""
    y0, x0 = torch.floor(ys), torch.floor(xs)
    found = torch.zeros((), dtype=image.dtype, device=image.device)
    for y, x in ((y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1)):
        weight = (1 - (ys - y).abs()) * (1 - (xs - x).abs())
        found = found + _pixels(image, y.long(), x.long()) * weight.unsqueeze(1)
    return found


def _pixels(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """Return pixels of `image` (n, c, h, w) at integer positions (n, a, b) as (n, c, a, b), 0 outside."""
    n, c, h, w = image.shape
    inside = (ys >= 0) & (ys < h) & (xs >= 0) & (xs < w)
    flat = (ys.clamp(0, h - 1) * w + xs.clamp(0, w - 1)).reshape(n, 1, -1).expand(n, c, -1)
    found = image.reshape(n, c, h * w).gather(2, flat).reshape(n, c, *ys.shape[1:])
    return found * inside.unsqueeze(1).to(found.dtype)


def _affine_grid(call: OpCall, theta: Tensor, size: list[int]) -> Tensor:
    check_made(str(call.node), [*size, 3])
    return functional.affine_grid(theta, size, bool(call.get("align_corners", 0)))


OPERATORS: dict[str, Any] = {
    "Resize": Operator(_resize, ints=(3,), numbers=(1, 2)),
    "Upsample": Operator(_upsample, numbers=(1,)),
    "GridSample": _grid_sample,
    "AffineGrid": Operator(_affine_grid, ints=(1,)),
    "RoiAlign": _roi_align,
}
