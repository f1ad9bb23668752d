"""Load stored tensors: lazy handles, and atomic loads into live objects.

    weight = open_checkpoint("runs/hello")["model.weight"]
    weight.shape, weight.dtype  # nothing is read
    weight[10:20]               # only the blocks that hold these rows, each verified

An atomic load has two passes. The first verifies every needed block, so that damage shows before an object
changes. The second reads the bytes into place and verifies them again; an error then means that the storage
changed in between. Tensors without contiguous CPU memory are read through a buffer of 16 MiB.

Bytes of a remote storage are transferred once and kept until all are verified.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from torchrelay.checkpoint.format.dtypes import BLOCK, by_name, memory_of, torch_dtype
from torchrelay.checkpoint.format.mesh_geometry import (
    Bounds,
    LocalTarget,
    Window,
    halves,
    intersect,
    whole,
    whole_target,
)
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import matches
from torchrelay.checkpoint.format.shard.reads import ReadOptions
from torchrelay.checkpoint.load.reads.leaf_reader import NOWHERE, LeafRead, LeafReader, ReadPlan
from torchrelay.checkpoint.state.names import overlaps_of
from torchrelay.checkpoint.state.tensor_memory import NOTHING, InPlace, Read, put
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, PartiallyLoadedError, RelayError, UsageError
from torchrelay.records import dataclass

Fill = Callable[[int, int, memoryview], None]
"""Fills memory with the bytes [start, stop) of a tensor."""
Interval = tuple[int, int]
BATCH = 16 * BLOCK
"""Rows that are wanted in part are read together up to this size."""


def read_box(
    fill: Fill, shape: Sequence[int], box: Sequence[Interval], dtype: torch.dtype, itemsize: int
) -> torch.Tensor:
    """Read half-open intervals of a tensor into new memory: long rows one by one, short ones together."""
    extents = [stop - start for start, stop in box]
    fresh = torch.empty((*extents, itemsize), dtype=torch.uint8)
    if fresh.numel():
        _fill(fill, fresh, (*shape, itemsize), (*box, (0, itemsize)), 0)
    return (
        fresh.reshape(-1).view(dtype).reshape(extents) if fresh.numel() else torch.empty(extents, dtype=dtype)
    )


def _fill(fill: Fill, out: torch.Tensor, shape: Sequence[int], box: Sequence[Interval], base: int) -> None:
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
    """A tensor of an epoch that is not read yet. Indexing and `read` return tensors in new memory."""

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
            raise UsageError(f"{self.name} is 0-dimensional and has no length: use read()")
        return self.shape[0]

    def read(
        self, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read all of it, verified; `dtype` converts floating-point tensors only.

        Raises DamagedError or StorageError if stored bytes are wrong or unreadable.
        """
        whole = self.read_box([(0, extent) for extent in self.shape])
        return whole.to(device=device, dtype=dtype if whole.is_floating_point() else None)

    def read_box(self, box: list[Interval]) -> torch.Tensor:
        """Read a part, one half-open interval per dimension, verified. Raises as `read` does."""
        return read_box(self.fill, self.shape, box, self.dtype, self._element.itemsize)

    def fill(self, start: int, stop: int, memory: memoryview) -> None:
        """Fill 1-D memory with the bytes [start, stop), row-major, verified. Raises as `read` does."""
        with self._guard():
            self._reader.read_range(self.name, start, stop, memory, self._node)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a part by integers and slices, as of a tensor; only the blocks that hold it."""
        keys = self._full(key if isinstance(key, tuple) else (key,))
        part = self.read_box(
            [(one.start, one.stop) if isinstance(one, slice) else (one, one + 1) for one in keys]
        )
        then = tuple(slice(None, None, one.step) if isinstance(one, slice) else 0 for one in keys)
        return part[then] if then else part

    def _full(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        dots = [place for place, one in enumerate(keys) if one is Ellipsis]
        missing = len(self.shape) - (len(keys) - len(dots))
        if len(dots) > 1 or missing < 0:
            raise UsageError(f"{self.name} has {len(self.shape)} dimensions: invalid index {list(keys)}")
        at = dots[0] if dots else len(keys)
        found = (*keys[:at], *[slice(None)] * missing, *keys[at + len(dots) :])
        return tuple(self._checked(one, extent) for one, extent in zip(found, self.shape, strict=True))

    def _checked(self, one: Any, extent: int) -> Any:
        if isinstance(one, slice):
            try:
                start, stop, step = one.indices(extent)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{self.name}: invalid slice {one}: {error}") from None
            if step < 1:
                raise UsageError(f"{self.name}: {one} has a negative step: flip the result instead")
            return slice(start, max(start, stop), step)
        try:
            number = operator.index(one)
        except TypeError:
            raise UsageError(
                f"{self.name}: invalid index {one!r:.60}: expected integers and slices"
            ) from None
        if not -extent <= number < extent:
            raise UsageError(f"{self.name}: index {number} is out of range for a dimension of {extent}")
        return number % extent


Cast = torch.dtype | Mapping[str, torch.dtype] | None
"""A floating-point type, or types by pattern, first match; None keeps the stored type."""


def checked_cast(dtype: Cast) -> Cast:
    """The type or types, checked; raises UsageError unless floating-point."""
    for one in dtype.values() if isinstance(dtype, Mapping) else [] if dtype is None else [dtype]:
        if not isinstance(one, torch.dtype) or not one.is_floating_point:
            raise UsageError(
                f"invalid dtype={one!r}: expected a floating-point type of torch, such as torch.bfloat16"
            )
    return dtype


def check_types_used(names: Iterable[str], dtype: Cast) -> None:
    """Raise UsageError for a pattern that matches no name."""
    known = list(dict.fromkeys(names)) if isinstance(dtype, Mapping) else []
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if not any(matches(name, pattern) for name in known):
            raise UsageError(f"no leaf matches {pattern!r}, a pattern of dtype{nearest(pattern, known)}")


def cast_of(name: str, dtype: Cast) -> torch.dtype | None:
    """The type for a name; None to keep its type."""
    if not isinstance(dtype, Mapping):
        return dtype
    return next((one for pattern, one in dtype.items() if matches(name, pattern)), None)


def cast(tensor: torch.Tensor, name: str, dtype: Cast) -> torch.Tensor:
    """Convert a floating-point tensor to its new type; others are returned unchanged."""
    wanted = cast_of(name, dtype)
    return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor


def checked_device(device: str | torch.device | None) -> str | torch.device | None:
    """The device, checked; raises UsageError if torch or this machine lacks it."""
    if device is None:
        return None
    try:
        torch.empty(0, device=device)
    except Exception as error:  # the device decides whether it is AssertionError, RuntimeError or TypeError
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"device={device!r} cannot be used here ({reason}): use 'cpu'") from error
    return device


AT_ONCE = 16 << 20
"""Bytes of the buffer for tensors that cannot be read into directly.

With the slabs of all threads this stays below 64 MiB.
"""
PIECE = AT_ONCE // 2


class LeafSource(Protocol):
    """Source of leaves: an epoch, or a file of blobs."""

    @property
    def options(self) -> ReadOptions:
        """Options for reading its files."""

    @property
    def is_remote(self) -> bool:
        """Whether each request has a high latency and bytes come over the network."""

    def plan(self, reads: Sequence[LeafRead]) -> ReadPlan:
        """Plan the reads of all destinations; raises UsageError and DamagedError, reads no block."""


@dataclass(frozen=True)
class TensorRead:
    """A tensor of a restoration, and the stored leaf that it comes from, as `node` has it."""

    read: Read
    stored: str
    node: str | None = None

    def into(self, memory: memoryview, target: LocalTarget | None = None) -> LeafRead:
        """Read all of it, or the boxes of `target`, into this memory."""
        return LeafRead(self.stored, memory, self.node, target or self.read.target)


@dataclass(frozen=True)
class TensorColumns:
    """Many tensors that are read together: `check` verifies their blocks, `fill` reads into memory."""

    in_place: InPlace = NOTHING
    check: Callable[[], int] = lambda: 0
    fill: Callable[[Sequence[Memory]], object] = lambda memories: None


class Loading:
    """A load of these tensors: `first`, then `second`.

    If not `atomic`, or if no block is to be verified, `second` reads straight into place. Without blocks to
    verify, `first` only checks that the file is unchanged since it was opened.
    """

    def __init__(
        self,
        source: LeafSource,
        wanted: Sequence[TensorRead],
        columns: TensorColumns | None = None,
        *,
        atomic: bool = True,
    ) -> None:
        self._source, self._wanted, self._atomic = source, wanted, atomic
        self._columns = columns or TensorColumns()
        self._fresh = [one for one in wanted if one.read.live is None]
        self._direct = [one for one in wanted if one.read.destination is not None]
        others = [one for one in wanted if one.read.destination is None]
        self._passing = {one: one.read.live for one in others if one.read.live is not None}
        self._staged = atomic and source.is_remote
        """Read into a buffer, then copied."""
        self._twice = atomic and not self._staged and source.options.verify
        """Verified, then read into place."""
        self.checked = 0
        """Bytes that `first` has verified and `second` reads again."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._beside: Sequence[Memory] = ()

    @property
    def _live(self) -> bool:
        """Whether the user's objects change during the reads."""
        return bool(self._columns.in_place.tensors or self._direct or self._passing)

    @cached_property
    def _into_place(self) -> ReadPlan:
        """One plan for both passes: for many tensors planning costs more than the reads."""
        return self._source.plan([one.into(memory_of(one.read.memory())) for one in self._direct])

    def first(self) -> None:
        """Do everything that can fail without changing an object; raises BlobError and StorageError."""
        self._check_apart()
        self._read([one.into(memory_of(one.read.memory())) for one in self._fresh])
        if self._atomic and not self._staged:
            self.checked = self._columns.check()
        if self._twice:
            passing = self._source.plan([one.into(NOWHERE) for one in self._passing])
            self.checked += sum(plan.check(self._source.options) for plan in (self._into_place, passing))
        elif self._staged:
            self._beside, self._kept = self._columns.in_place.beside()
            self._columns.fill(self._beside)
            places = [(one, one.read.memory()) for one in self._direct]
            found = [(one, live, one.read.fresh()) for one, live in (*places, *self._passing.items())]
            self._read([one.into(memory_of(fresh)) for one, _, fresh in found])
            self._copies = [(live, fresh) for _, live, fresh in found]

    def second(self) -> None:
        """Put everything into place; raises PartiallyLoadedError if the storage fails."""
        if self._staged:
            with torch.no_grad():
                self._columns.in_place.put(self._beside)
                for live, fresh in self._copies:
                    put(live, fresh)
            return
        with naming_what_changed(live=self._live, verified=self._twice), torch.no_grad():
            self._into_place.read(self._source.options)
            for batch in _batches(self._passing):
                pieces = [
                    (wanted, part, target, torch.empty(target.shape, dtype=wanted.read.dtype))
                    for wanted, part, target in batch
                ]
                self._read([wanted.into(memory_of(one), target) for wanted, _, target, one in pieces])
                for _, part, _, one in pieces:
                    put(part, one)
            self._columns.fill(self._columns.in_place.plain.memories)

    def _check_apart(self) -> None:
        """Raise for objects that share part of their memory: the later read would overwrite the earlier."""
        in_place, others = self._columns.in_place, [one for one in self._wanted if one.read.live is not None]
        blobs = {one.read.spec.name: one.read.spec.blob for one in others}
        if len(set(blobs.values())) + len(in_place.tensors) < 2:  # a single object cannot conflict
            return
        live = {one.read.spec.name: one.read.live for one in others if one.read.live is not None}
        storages = [*in_place.plain.storages, *(one.untyped_storage() for one in live.values())]
        if len(set(map(torch.UntypedStorage.data_ptr, storages))) == len(storages):
            return
        live = {**in_place.tensors, **live}
        blobs |= {name: name for name in in_place.tensors}
        for name, (other, _) in overlaps_of(live).items():
            if blobs[name] != blobs[other]:
                raise BlobError(
                    f"{name} and {other} share memory here and are two leaves of the checkpoint; nothing "
                    f"was changed. Load one of them: exclude=[{name!r}]"
                )

    def _read(self, reads: Sequence[LeafRead]) -> None:
        if reads:
            self._source.plan(reads).read(self._source.options)


@contextmanager
def naming_what_changed(*, live: bool, verified: bool = False) -> Iterator[None]:
    """Raise PartiallyLoadedError for our errors if memory is `live`; `verified`: its bytes were, before."""
    try:
        yield
    except RelayError as error:
        if not live or isinstance(error, PartiallyLoadedError):
            raise
        why = "reading failed after objects had changed"
        if verified:
            why = "the storage changed or failed between the verification of all bytes and their use"
        raise PartiallyLoadedError(
            f"{why}: {error}; the objects may hold a mix of old and new content: load them again before "
            "you use them"
        ) from error


def _batches(
    passing: Mapping[TensorRead, torch.Tensor],
) -> Iterator[list[tuple[TensorRead, torch.Tensor, LocalTarget]]]:
    """Boxes of live tensors that fit in the buffer together, and the parts of leaves that fill them."""
    batch: list[tuple[TensorRead, torch.Tensor, LocalTarget]] = []
    for wanted, live in passing.items():
        target = wanted.read.target or whole_target(tuple(live.shape))
        for box, part in _boxes(live):
            if batch and sum(one.nbytes for _, one, _ in batch) + part.nbytes > AT_ONCE:
                yield batch
                batch = []
            batch.append((wanted, part, LocalTarget(tuple(part.shape), tuple(_windows(target, box)))))
    if batch:
        yield batch


def runs_of(live: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of a tensor of at most PIECE bytes, in order, each with its offset in the whole."""
    at = 0
    for _, part in _boxes(live):
        yield at, part
        at += part.nbytes


def _boxes(live: torch.Tensor) -> Iterator[tuple[Bounds, torch.Tensor]]:
    """Cut along the first dimensions, so that each box is one contiguous run of bytes."""
    pending: list[Bounds] = [whole(tuple(live.shape))] if live.numel() else []
    while pending:
        box = pending.pop()
        elements = prod(stop - start for start, stop in box)
        if elements > 1 and elements * live.element_size() > PIECE:
            pending += reversed(halves(box))
        else:
            yield box, live[tuple(slice(*side) for side in box)]


def _windows(target: LocalTarget, box: Bounds) -> Iterator[Window]:
    """The parts of a target that intersect a box, as windows of a destination that is this box."""
    for window in target.windows:
        if (part := intersect(window.place, box)) is None:
            continue
        sides = zip(part, window.box, window.place, strict=True)
        source = tuple((a - at + low, b - at + low) for (a, b), (low, _), (at, _) in sides)
        place = tuple((a - low, b - low) for (a, b), (low, _) in zip(part, box, strict=True))
        yield Window(source, place)
