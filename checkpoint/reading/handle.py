"""A stored tensor that is not read yet: what it is, and any part of it.

weight = open_checkpoint("runs/hello")["model.weight"]
weight.shape, weight.dtype          # nothing is read
weight[10:20]                       # only the blocks that hold these rows, each verified
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import by_name, torch_dtype
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.checkpoint.reading.regions import Interval, read_box
from torchrelay.errors import UsageError

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
