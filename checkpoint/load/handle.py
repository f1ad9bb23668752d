"""Handles of stored tensors that are not read yet; the element type and device that a load gives them.

weight = open_checkpoint("runs/hello")["model.weight"]
weight.shape, weight.dtype          # nothing is read
weight[10:20]                       # only the blocks that hold these rows, each verified
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import BLOCK, by_name, memory_of, torch_dtype
from torchrelay.checkpoint.format.manifest.position import matches
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.errors import UsageError

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


Guard = Callable[[], AbstractContextManager[None]]


class TensorHandle:
    """One tensor of an epoch, as `node` has it. Indexing and `read` give tensors in fresh memory."""

    def __init__(self, reader: LeafReader, name: str, node: str | None, guard: Guard) -> None:
        row = reader.spec(name, node)
        self.name = name
        self.shape = torch.Size(row.shape)
        self._element = by_name(row.dtype or "")
        self.dtype = torch_dtype(self._element)
        self.nbytes = row.nbytes
        self._reader, self._node, self._guard = reader, node, guard

    def __repr__(self) -> str:
        return f"<{self.name}: {self._element.name}{list(self.shape)}, not read>"

    def __len__(self) -> int:
        if not self.shape:
            raise UsageError(f"{self.name} has no dimension, so no length: read() it")
        return self.shape[0]

    def read(
        self, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """All of it, verified; `dtype` converts floating-point tensors only.

        Raises DamagedError or StorageError for what the storage has.
        """
        whole = self.read_box([(0, extent) for extent in self.shape])
        return whole.to(device=device, dtype=dtype if whole.is_floating_point() else None)

    def read_box(self, box: list[Interval]) -> torch.Tensor:
        """One half-open interval per dimension, verified. Raises as `read` does."""
        return read_box(self.fill, self.shape, box, self.dtype, self._element.itemsize)

    def fill(self, start: int, stop: int, memory: memoryview) -> None:
        """Fill 1-D memory with its bytes [start, stop), row-major, verified. Raises as `read` does."""
        with self._guard():
            self._reader.read_range(self.name, start, stop, memory, self._node)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """A part by integers and slices, as of a tensor; only whole blocks that hold it are read."""
        keys = self._full(key if isinstance(key, tuple) else (key,))
        box, then = zip(*map(_interval, keys), strict=True) if keys else ((), ())
        part = self.read_box(list(box))
        return part[then] if then else part

    def _full(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        """One integer or slice per dimension."""
        dots = [place for place, one in enumerate(keys) if one is Ellipsis]
        missing = len(self.shape) - (len(keys) - len(dots))
        if len(dots) > 1 or missing < 0:
            raise UsageError(f"{self.name} has {len(self.shape)} dimensions: it has no part {list(keys)}")
        at = dots[0] if dots else len(keys)
        found = (*keys[:at], *[slice(None)] * missing, *keys[at + len(dots) :])
        return tuple(self._checked(one, extent) for one, extent in zip(found, self.shape, strict=True))

    def _checked(self, one: Any, extent: int) -> Any:
        if isinstance(one, slice):
            try:
                start, stop, step = one.indices(extent)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{self.name}: {one} is no slice: {error}") from None
            if step < 1:
                raise UsageError(f"{self.name}: {one} steps backwards: flip what you read")
            return slice(start, max(start, stop), step)
        try:
            number = operator.index(one)
        except TypeError:
            raise UsageError(f"{self.name} is indexed by integers and slices, not by {one!r:.60}") from None
        if not -extent <= number < extent:
            raise UsageError(f"{self.name}: {number} is outside of a dimension of {extent}")
        return number % extent


def _interval(key: Any) -> tuple[Interval, Any]:
    """What to read of one dimension, and how to index what was read."""
    if isinstance(key, slice):
        return (key.start, key.stop), slice(None, None, key.step)
    return (key, key + 1), 0


Cast = torch.dtype | Mapping[str, torch.dtype] | None
"""A floating-point type, or types by pattern of which the first that fits counts; None changes nothing."""


def checked_cast(dtype: Cast) -> Cast:
    """The same; raises UsageError for anything that is no floating-point type."""
    for one in dtype.values() if isinstance(dtype, Mapping) else [] if dtype is None else [dtype]:
        if not isinstance(one, torch.dtype) or not one.is_floating_point:
            raise UsageError(f"dtype={one!r}: give a floating-point type of torch, such as torch.bfloat16")
    return dtype


def check_types_used(names: Iterable[str], dtype: Cast) -> None:
    """Raise UsageError for a pattern that means none of the names: most likely a misspelt one."""
    known = list(dict.fromkeys(names)) if isinstance(dtype, Mapping) else []
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if not any(matches(name, pattern) for name in known):
            raise UsageError(f"no leaf matches {pattern!r}, a pattern of dtype{nearest(pattern, known)}")


def cast_of(name: str, dtype: Cast) -> torch.dtype | None:
    """The type for a name; None where it stays what it is."""
    if not isinstance(dtype, Mapping):
        return dtype
    return next((one for pattern, one in dtype.items() if matches(name, pattern)), None)


def cast(tensor: torch.Tensor, name: str, dtype: Cast) -> torch.Tensor:
    """The tensor in its new type; only floating-point tensors are converted."""
    wanted = cast_of(name, dtype)
    return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor


def checked_device(device: str | torch.device | None) -> str | torch.device | None:
    """The same; raises UsageError for one that torch does not know or this machine lacks."""
    if device is None:
        return None
    try:
        torch.empty(0, device=device)
    except Exception as error:  # AssertionError, RuntimeError, TypeError: it depends on the device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(
            f"device={device!r} cannot be used here ({reason}): give 'cpu', or another"
        ) from error
    return device
