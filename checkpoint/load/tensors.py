"""Stored tensors: handles that are not read yet, and loads into live objects, all of them or none.

weight = open_checkpoint("runs/hello")["model.weight"]
weight.shape, weight.dtype          # nothing is read
weight[10:20]                       # only the blocks that hold these rows, each verified

First every block that is needed is verified where it lies, in the page cache, and forgotten again: damage
shows before an object has changed. Then the bytes are read into their places and verified once more as they
pass. If they are wrong now, the storage changed between the two reads, and the error says so. What has no
plain CPU memory of its own, on a device or not contiguous, passes through 16 MiB.

A far storage would send everything twice; what is read from there is kept until all of it has come.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from torchrelay.checkpoint.format.dtypes import BLOCK, by_name, memory_of, torch_dtype
from torchrelay.checkpoint.format.layouts import LocalTarget, Window, whole_target
from torchrelay.checkpoint.format.mesh_geometry import Bounds, halves, intersect, whole
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import matches
from torchrelay.checkpoint.format.shard.reads import ReadOptions
from torchrelay.checkpoint.load.reads.leaf_reader import NOWHERE, LeafRead, LeafReader, ReadPlan
from torchrelay.checkpoint.state.names import overlaps_of
from torchrelay.checkpoint.state.reads import Read, put
from torchrelay.checkpoint.state.tensor_checks import NOTHING, InPlace
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, PartiallyLoadedError, RelayError, UsageError
from torchrelay.records import dataclass

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


AT_ONCE = 16 << 20
"""Bytes beyond the destinations that pass at a time where a tensor's own memory cannot be read into; with
what the threads need for slabs these are less than 64 MiB."""
PIECE = AT_ONCE // 2


class LeafSource(Protocol):
    """Where leaves come from: an epoch, or a file of blobs."""

    @property
    def options(self) -> ReadOptions:
        """How its files are read."""

    @property
    def is_far(self) -> bool:
        """Whether each request takes its time, and each byte a way over the network."""

    def plan(self, reads: Sequence[LeafRead]) -> ReadPlan:
        """What it takes to fill all destinations; raises UsageError and DamagedError, reads no block."""


@dataclass(frozen=True)
class TensorRead:
    """A tensor of a restoration, and the stored leaf that it comes from, as `node` has it."""

    read: Read
    stored: str
    node: str | None = None

    def into(self, memory: memoryview, target: LocalTarget | None = None) -> LeafRead:
        """The read of all of it, or of the boxes of `target`, into this memory."""
        return LeafRead(self.stored, memory, self.node, target or self.read.target)


@dataclass(frozen=True)
class TensorColumns:
    """Very many tensors that are read together: `check` verifies their blocks, `fill` reads into memories."""

    in_place: InPlace = NOTHING
    check: Callable[[], int] = lambda: 0
    fill: Callable[[Sequence[Memory]], object] = lambda memories: None


class _Way(Enum):
    TWO_PASSES = "verified, then read into place"
    STAGED = "read beside, then copied"
    STRAIGHT = "read into place"


class Loading:
    """A load of these tensors: `first`, then `second`.

    Without `atomic` everything is read straight into place by `second`. So it is where no block is to be
    verified; then `first` only looks whether the file is still the one that was opened.
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
        self._way = _Way.STRAIGHT
        if atomic and source.is_far:
            self._way = _Way.STAGED
        elif atomic and source.options.verify:
            self._way = _Way.TWO_PASSES
        self.checked = 0
        """Bytes that `first` has verified and `second` reads again."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._beside: Sequence[Memory] = ()

    @property
    def _live(self) -> bool:
        """Whether objects of the user change while the bytes come."""
        return bool(self._columns.in_place.tensors or self._direct or self._passing)

    @cached_property
    def _into_place(self) -> ReadPlan:
        """One plan for both passes: for very many tensors it costs more than they do."""
        return self._source.plan([one.into(memory_of(one.read.memory())) for one in self._direct])

    def first(self) -> None:
        """Do whatever can fail without an object being changed.

        Raises BlobError, DamagedError or StorageError.
        """
        self._check_apart()
        self._read([one.into(memory_of(one.read.memory())) for one in self._fresh])
        if self._atomic and self._way is not _Way.STAGED:
            self.checked = self._columns.check()
        if self._way is _Way.TWO_PASSES:
            passing = self._source.plan([one.into(NOWHERE) for one in self._passing])
            self.checked += sum(plan.check(self._source.options) for plan in (self._into_place, passing))
        elif self._way is _Way.STAGED:
            self._beside, self._kept = self._columns.in_place.beside()
            self._columns.fill(self._beside)
            places = [(one, one.read.memory()) for one in self._direct]
            found = [(one, live, one.read.fresh()) for one, live in (*places, *self._passing.items())]
            self._read([one.into(memory_of(fresh)) for one, _, fresh in found])
            self._copies = [(live, fresh) for _, live, fresh in found]

    def second(self) -> None:
        """Put everything into its place; raises PartiallyLoadedError where the storage fails now."""
        if self._way is _Way.STAGED:
            with torch.no_grad():
                self._columns.in_place.put(self._beside)
                for live, fresh in self._copies:
                    put(live, fresh)
            return
        with naming_what_changed(live=self._live, verified=self._way is _Way.TWO_PASSES), torch.no_grad():
            self._into_place.read(self._source.options)
            for batch in _batches(self._passing):
                memories = [torch.empty(piece.target.shape, dtype=piece.wanted.read.dtype) for piece in batch]
                both = list(zip(batch, memories, strict=True))
                self._read([piece.wanted.into(memory_of(one), piece.target) for piece, one in both])
                for piece, one in both:
                    put(piece.live, one)
            self._columns.fill(self._columns.in_place.memories)

    def _check_apart(self) -> None:
        """Refuse objects that share memory in part: the leaf that is read last would overwrite the other."""
        in_place, others = self._columns.in_place, [one for one in self._wanted if one.read.live is not None]
        blobs = {one.read.spec.name: one.read.spec.blob for one in others}
        if len(set(blobs.values())) + len(in_place.tensors) < 2:  # one object is as its program built it
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
                    f"{name} and {other} share memory here and are two leaves of the checkpoint; nothing was "
                    f"changed. Load one of them: exclude=[{name!r}]"
                )

    def _read(self, reads: Sequence[LeafRead]) -> None:
        if reads:
            self._source.plan(reads).read(self._source.options)


@contextmanager
def naming_what_changed(*, live: bool, verified: bool = False) -> Iterator[None]:
    """Turn our errors into PartiallyLoadedError where what is read goes into `live` memory.

    `verified` says that the same bytes were right a moment before.
    """
    try:
        yield
    except RelayError as error:
        if not live or isinstance(error, PartiallyLoadedError):
            raise
        why = "reading failed after objects had changed"
        if verified:
            why = "the storage changed or failed between the verification of all bytes and their use"
        raise PartiallyLoadedError(
            f"{why}: {error}; the given objects may hold new and old content now: load them again before you "
            "use them, from another epoch or copy if this one stays damaged"
        ) from error


@dataclass(frozen=True)
class _LiveBox:
    """A box of a live tensor, and what of the stored leaf belongs into it."""

    wanted: TensorRead
    live: torch.Tensor
    target: LocalTarget

    @property
    def nbytes(self) -> int:
        return prod(self.target.shape) * self.live.element_size()


def _batches(passing: Mapping[TensorRead, torch.Tensor]) -> Iterator[list[_LiveBox]]:
    batch: list[_LiveBox] = []
    for piece in (piece for one, live in passing.items() for piece in _pieces(one, live)):
        if batch and sum(one.nbytes for one in batch) + piece.nbytes > AT_ONCE:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _pieces(wanted: TensorRead, live: torch.Tensor) -> Iterator[_LiveBox]:
    target = wanted.read.target or whole_target(tuple(live.shape))
    for box in _boxes(live):
        shape = tuple(stop - start for start, stop in box)
        yield _LiveBox(wanted, live[_slices(box)], LocalTarget(shape, tuple(_windows(target, box))))


def runs_of(live: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of a tensor of at most PIECE bytes, in order, each with its first byte of the whole in order."""
    at = 0
    for box in _boxes(live):
        part = live[_slices(box)]
        yield at, part
        at += part.numel() * live.element_size()


def _boxes(live: torch.Tensor) -> Iterator[Bounds]:
    """Cut along the first dimensions, so that each is one run of bytes where the whole lies in order."""
    pending: list[Bounds] = [whole(tuple(live.shape))] if live.numel() else []
    while pending:
        box = pending.pop()
        elements = prod(stop - start for start, stop in box)
        if elements > 1 and elements * live.element_size() > PIECE:
            pending += reversed(halves(box))
        else:
            yield box


def _slices(box: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def _windows(target: LocalTarget, box: Bounds) -> Iterator[Window]:
    """What of a target lies in a box of it, as windows of a destination that is this box."""
    for window in target.windows:
        if (part := intersect(window.place, box)) is None:
            continue
        sides = zip(part, window.box, window.place, strict=True)
        source = tuple((a - at + low, b - at + low) for (a, b), (low, _), (at, _) in sides)
        place = tuple((a - low, b - low) for (a, b), (low, _) in zip(part, box, strict=True))
        yield Window(source, place)
