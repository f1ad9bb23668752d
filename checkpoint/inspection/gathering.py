"""A box of a leaf out of a part that stores it in another order, row-major and verified. Needs numpy."""

from __future__ import annotations

import math

from torchrelay.checkpoint.format.mesh_geometry import Bounds, whole
from torchrelay.checkpoint.inspection.contents import Epoch
from torchrelay.checkpoint.inspection.numerics import np
from torchrelay.checkpoint.inspection.tensor_bytes import Buffer, Part
from torchrelay.checkpoint.load.reads.boxes import Copy, Slab


def small_boxes(part: Part, source: Bounds, first: int, box: Bounds) -> list[Bounds]:
    """The box cut so that each can be read from the part with one range of a few MiB."""
    return [slab.box for slab in _copy(source, first, box).slabs(part.item_bytes)]


def gathered(epoch: Epoch, part: Part, source: Bounds, first: int, box: Bounds, buffer: Buffer) -> memoryview:
    """The bytes of a box of which `source`, from element `first` of the part on, holds all elements.

    Raises DamagedError or StorageError for what the storage has.
    """
    words = next(size for size in (8, 4, 2, 1) if part.item_bytes % size == 0)
    many = part.item_bytes // words
    copy = _copy(source, first, box)
    out = np.empty((*copy.shape, many), f"<u{words}")
    strides = _strides(source, part.item_bytes)
    for slab in copy.slabs(part.item_bytes):
        data = np.frombuffer(buffer.filled(epoch, part, *slab.span), f"<u{words}")
        size = [high - low for low, high in slab.box]
        stored = np.lib.stride_tricks.as_strided(data, [*size, many], [*strides, words], writeable=False)
        out[_place(slab, box)] = stored
    return out.reshape(-1).view(np.uint8).data


def _copy(source: Bounds, first: int, box: Bounds) -> Copy:
    extents = tuple(stop - start for start, stop in box)
    return Copy(source, first, box, whole(extents), extents)


def _strides(source: Bounds, item_bytes: int) -> list[int]:
    extents = [stop - start for start, stop in source]
    return [item_bytes * math.prod(extents[dim + 1 :]) for dim in range(len(extents))]


def _place(slab: Slab, box: Bounds) -> tuple[slice, ...]:
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(slab.box, box, strict=True))
