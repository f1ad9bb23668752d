"""Values of grids and regions between the pixels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.limits import check_made
from torchrelay.checkpoint.onnx_in.ops.operator import Operator

_MODES = {
    "bilinear": "bilinear",
    "linear": "bilinear",
    "bicubic": "bicubic",
    "cubic": "bicubic",
    "nearest": "nearest",
}


def _grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    mode, padding = _MODES[call.get("mode", "bilinear")], call.get("padding_mode", "zeros")
    if x.dim() == 5 and mode == "bicubic":
        raise call.fail("torch has no cubic samples of volumes")
    return functional.grid_sample(x, grid.to(x.dtype), mode, padding, bool(call.get("align_corners", 0)))


def _affine_grid(call: Call, theta: Tensor, size: list[int]) -> Tensor:
    check_made(str(call.node), [*size, 3])
    return functional.affine_grid(theta, size, bool(call.get("align_corners", 0)))


def _roi_align(call: Call, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    """Means or maxima of samples in the cells of each region (He and others, 2017)."""
    height, width = call.get("output_height", 1), call.get("output_width", 1)
    half = call.get(
        "coordinate_transformation_mode", "half_pixel" if call.version >= 16 else "output_half_pixel"
    )
    shift = 0.5 if half == "half_pixel" else 0.0
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
    if maxima:  # the greatest of the weighted corners, as the standard has it
        return torch.stack(cells).amax((0, 3, 5))
    return torch.stack(cells).sum(0).mean((2, 4))


def _corners(image: Tensor, ys: Tensor, xs: Tensor) -> list[Tensor]:
    """The four neighbours of each place, weighted; places just outside count as the border, others as 0."""
    h, w = image.shape[1:]
    inside = ((ys >= -1) & (ys <= h))[:, None] & ((xs >= -1) & (xs <= w))[None]
    ys, xs = ys.clamp(0, h - 1), xs.clamp(0, w - 1)
    y0, x0 = ys.floor().long().clamp(max=h - 1), xs.floor().long().clamp(max=w - 1)
    y1, x1 = (y0 + 1).clamp(max=h - 1), (x0 + 1).clamp(max=w - 1)
    fy, fx = (ys - y0)[:, None], (xs - x0)[None]
    found = []
    for rows, columns, weight in (
        (y0, x0, (1 - fy) * (1 - fx)), (y0, x1, (1 - fy) * fx), (y1, x0, fy * (1 - fx)), (y1, x1, fy * fx),
    ):  # fmt: skip
        found.append(image[:, rows][:, :, columns] * weight * inside)
    return found


OPERATORS: dict[str, Any] = {
    "GridSample": _grid_sample,
    "AffineGrid": Operator(_affine_grid, ints=(1,)),
    "RoiAlign": _roi_align,
}
