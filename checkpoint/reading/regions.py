"""Boxes of a tensor out of its row-major bytes: few reads, and only near the bytes that are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchrelay.checkpoint.format.dtypes import BLOCK, memory_of

Fill = Callable[[int, int, memoryview], None]
"""Fills memory with the bytes [start, stop) of a tensor."""
Interval = tuple[int, int]
BATCH = 16 * BLOCK
"""Rows of which only a part is wanted are read together up to this size."""


def read_box(
    fill: Fill, shape: Sequence[int], box: Sequence[Interval], dtype: torch.dtype, itemsize: int
) -> torch.Tensor:
    """The part `box` (one half-open interval per dimension) of a tensor, in fresh CPU memory.

    Rows longer than a digest block are read one by one, shorter ones together and then cut, so that
    hardly a block is read without need.
    """
    extents = [stop - start for start, stop in box]
    fresh = torch.empty((*extents, itemsize), dtype=torch.uint8)
    if fresh.numel():
        _fill(fill, fresh, (*shape, itemsize), (*box, (0, itemsize)), 0)
    return (
        fresh.reshape(-1).view(dtype).reshape(extents) if fresh.numel() else torch.empty(extents, dtype=dtype)
    )


def _fill(fill: Fill, out: torch.Tensor, shape: Sequence[int], box: Sequence[Interval], base: int) -> None:
    """Fill contiguous bytes; `base` is where the tensor of `shape` begins."""
    row = math.prod(shape[1:])
    start, stop = box[0]
    inner = tuple(box[1:])
    if all(interval == (0, extent) for interval, extent in zip(inner, shape[1:], strict=True)):
        fill(base + start * row, base + stop * row, memory_of(out))
    elif row > BLOCK:
        for index in range(start, stop):
            _fill(fill, out[index - start], shape[1:], inner, base + index * row)
    else:
        wanted = tuple(slice(first, last) for first, last in inner)
        for index in range(start, stop, step := max(1, BATCH // row)):
            count = min(step, stop - index)
            rows = torch.empty((count, *shape[1:]), dtype=torch.uint8)
            fill(base + index * row, base + (index + count) * row, memory_of(rows))
            out[index - start : index - start + count].copy_(rows[(slice(None), *wanted)])
