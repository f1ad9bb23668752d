"""Resize and Upsample: one dimension after another, each as a weighted sum of a few neighbours."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.limits import check_made
from torchrelay.checkpoint.onnx_in.ops.operator import Operator

Numbers = list[Any] | None


def _resize(call: Call, x: Tensor, roi: Numbers = None, scales: Numbers = None, sizes: Any = None) -> Tensor:
    if call.version < 11:  # scales were the second input, and places went without half pixels
        return _resized(call, x, list(range(x.dim())), roi or [], None, None, "asymmetric", "floor")
    axes = [at % x.dim() for at in call.get("axes", range(x.dim()))]
    factors, wanted, bounds = scales or None, sizes or None, roi or None
    places = call.get("coordinate_transformation_mode", "half_pixel")
    if factors is None and wanted is None:
        raise call.fail("neither scales nor sizes are given")
    if wanted is not None:
        factors, wanted = _by_policy(call, x, axes, wanted)
    return _resized(
        call, x, axes, factors or [], wanted, bounds, places, call.get("nearest_mode", "round_prefer_floor")
    )


def _by_policy(call: Call, x: Tensor, axes: list[int], sizes: list[Any]) -> tuple[list[float], list[Any]]:
    factors = [size / x.shape[at] for at, size in zip(axes, sizes, strict=True)]
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return factors, sizes
    one = min(factors) if policy == "not_larger" else max(factors)
    return [one] * len(axes), [math.floor(one * x.shape[at] + 0.5) for at in axes]


def _upsample(call: Call, x: Tensor, scales: Numbers = None) -> Tensor:
    factors = scales or list(call.get("scales", ()))
    return _resized(call, x, list(range(x.dim())), factors, None, None, "asymmetric", "floor")


def _resized(
    call: Call, x: Tensor, axes: list[int], factors: list[float], sizes: list[Any] | None,
    roi: list[float] | None, places: str, nearest: str,
) -> Tensor:  # fmt: skip
    sizes = (
        [math.floor(x.shape[at] * one) for at, one in zip(axes, factors, strict=True)]
        if sizes is None
        else sizes
    )
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
    return (
        x
        if dtype.is_floating_point
        else (x.round() if call.get("mode", "nearest") != "nearest" else x).to(dtype)
    )


def _places(mode: str, size: int, length: int, factor: float, begin: float, end: float) -> Tensor:
    """Where each new element lies among the old ones."""
    at = torch.arange(size, dtype=torch.float64)
    if mode == "asymmetric":
        return at / factor
    if mode == "align_corners":
        return at * ((length - 1) / (factor * length - 1)) if factor * length > 1 else at * 0
    if mode == "pytorch_half_pixel":
        return (at + 0.5) / factor - 0.5 if size > 1 else at * 0
    if mode == "half_pixel_symmetric":
        shift = size / (factor * length)  # of the size that was asked for
        return length / 2 * (1 - shift) + (at + 0.5) / factor - 0.5
    if mode == "tf_crop_and_resize":
        if size > 1:
            return begin * (length - 1) + at * (end - begin) * (length - 1) / (size - 1)
        return 0.5 * (begin + end) * (length - 1) + at * 0
    return (at + 0.5) / factor - 0.5


def _along(call: Call, x: Tensor, axis: int, where: Tensor, factor: float, nearest: str) -> Tensor:
    mode, length = call.get("mode", "nearest"), x.shape[axis]
    if mode == "nearest":
        return x.index_select(axis, _nearest(where, nearest).clamp(0, length - 1))
    squeeze = min(factor, 1.0) if call.get("antialias", 0) else 1.0
    reach = (1 if mode == "linear" else 2) / squeeze
    first = torch.floor(where - reach).long() + 1
    near = first[:, None] + torch.arange(math.ceil(2 * reach) + 1, device=x.device)
    distance = (where[:, None] - near) * squeeze
    a = call.get("cubic_coeff_a", -0.75)
    weights = (1 - distance.abs()).clamp(min=0) if mode == "linear" else _cubic(distance, a)
    inside = (near >= 0) & (near < length)
    if call.get("exclude_outside", 0) or (call.get("antialias", 0)):
        weights = (
            torch.where(inside, weights, torch.zeros_like(weights))
            if call.get("exclude_outside", 0)
            else weights
        )
        weights = weights / weights.sum(1, keepdim=True)
    parts = x.index_select(axis, near.clamp(0, length - 1).reshape(-1))
    parts = parts.reshape(*x.shape[:axis], *near.shape, *x.shape[axis + 1 :])
    shape = [1] * parts.dim()
    shape[axis], shape[axis + 1] = near.shape
    return (parts * weights.to(x.dtype).reshape(shape)).sum(axis + 1)


def _nearest(where: Tensor, mode: str) -> Tensor:
    match mode:
        case "floor":
            return torch.floor(where).long()
        case "ceil":
            return torch.ceil(where).long()
        case "round_prefer_ceil":
            return torch.floor(where + 0.5).long()
    return torch.ceil(where - 0.5).long()


def _cubic(x: Tensor, a: float) -> Tensor:
    """Weights of cubic convolution (Keys, 1981)."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


OPERATORS: dict[str, Any] = {
    "Resize": Operator(_resize, ints=(3,), numbers=(1, 2)),
    "Upsample": Operator(_upsample, numbers=(1,)),
}
