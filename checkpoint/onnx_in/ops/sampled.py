"""Values of images between their pixels."""

from __future__ import annotations

import torch
from torch import Tensor


def bilinear(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """`image` (n, c, h, w) at the places `ys`, `xs` (n, a, b), as (n, c, a, b); outside of it lies 0."""
    y0, x0 = torch.floor(ys), torch.floor(xs)
    parts = []
    for dy in (0, 1):
        for dx in (0, 1):
            weight = (1 - (ys - (y0 + dy)).abs()) * (1 - (xs - (x0 + dx)).abs())
            parts.append(pixels(image, (y0 + dy).long(), (x0 + dx).long()) * weight.unsqueeze(1))
    return parts[0] + parts[1] + parts[2] + parts[3]


def pixels(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """The pixels of `image` (n, c, h, w) at whole places (n, a, b), as (n, c, a, b); outside of it 0."""
    n, c, h, w = image.shape
    inside = (ys >= 0) & (ys < h) & (xs >= 0) & (xs < w)
    flat = (ys.clamp(0, h - 1) * w + xs.clamp(0, w - 1)).reshape(n, 1, -1).expand(n, c, -1)
    found = image.reshape(n, c, h * w).gather(2, flat).reshape(n, c, *ys.shape[1:])
    return found * inside.unsqueeze(1).to(found.dtype)
