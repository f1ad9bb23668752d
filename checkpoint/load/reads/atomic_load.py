"""Stored bytes into live objects: all of them or none, and without a second copy of what is loaded.

First every block that is needed is verified where it lies, in the page cache, and forgotten again: damage
shows before an object has changed. Then the bytes are read into their places and verified once more as they
pass. If they are wrong now, the storage changed between the two reads, and the error says so. What has no
plain CPU memory of its own, on a device or not contiguous, passes through 16 MiB.

A far storage would send everything twice; what is read from there is kept until all of it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from math import prod
from typing import Protocol

import torch

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.layouts import Target, Window, whole_target
from torchrelay.checkpoint.format.mesh_geometry import Bounds, halves, intersect, whole
from torchrelay.checkpoint.format.shard.read_plan import ReadOptions
from torchrelay.checkpoint.load.reads.leaf_reader import NOWHERE, LeafRead, ReadPlan
from torchrelay.checkpoint.state.names import overlaps_of
from torchrelay.checkpoint.state.reads import Read, put
from torchrelay.checkpoint.state.tensor_checks import NOTHING, InPlace
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, PartiallyLoadedError, RelayError
from torchrelay.records import dataclass

AT_ONCE = 16 << 20
"""Bytes beyond the destinations that pass at a time where a tensor's own memory cannot be read into; with
what the threads need for slabs these are less than 64 MiB."""
PIECE = AT_ONCE // 2


class Source(Protocol):
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
class Wanted:
    """A tensor of a restoration, and the stored leaf that it comes from, as `node` has it."""

    read: Read
    stored: str
    node: str | None = None

    def into(self, memory: memoryview, target: Target | None = None) -> LeafRead:
        """The read of all of it, or of the boxes of `target`, into this memory."""
        return LeafRead(self.stored, memory, self.node, target or self.read.target)


@dataclass(frozen=True)
class Columns:
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
        self, source: Source, wanted: Sequence[Wanted], columns: Columns | None = None, *, atomic: bool = True
    ) -> None:
        self._source, self._wanted, self._atomic = source, wanted, atomic
        self._columns = columns or Columns()
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
        live = dict(self._columns.in_place.tensors)
        blobs = {name: name for name in live}
        for one in self._wanted:
            if one.read.live is not None:
                live[one.read.spec.name], blobs[one.read.spec.name] = one.read.live, one.read.spec.blob
        if len(set(blobs.values())) < 2:  # one object is as its program built it
            return
        if len({one.untyped_storage().data_ptr() for one in live.values()}) == len(live):
            return
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
class _Piece:
    """A box of a live tensor, and what of the stored leaf belongs into it."""

    wanted: Wanted
    live: torch.Tensor
    target: Target

    @property
    def nbytes(self) -> int:
        return prod(self.target.shape) * self.live.element_size()


def _batches(passing: Mapping[Wanted, torch.Tensor]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    for piece in (piece for one, live in passing.items() for piece in _pieces(one, live)):
        if batch and sum(one.nbytes for one in batch) + piece.nbytes > AT_ONCE:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _pieces(wanted: Wanted, live: torch.Tensor) -> Iterator[_Piece]:
    target = wanted.read.target or whole_target(tuple(live.shape))
    for box in _boxes(live):
        shape = tuple(stop - start for start, stop in box)
        yield _Piece(wanted, live[_slices(box)], Target(shape, tuple(_windows(target, box))))


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


def _windows(target: Target, box: Bounds) -> Iterator[Window]:
    """What of a target lies in a box of it, as windows of a destination that is this box."""
    for window in target.windows:
        if (part := intersect(window.place, box)) is None:
            continue
        sides = zip(part, window.box, window.place, strict=True)
        source = tuple((a - at + low, b - at + low) for (a, b), (low, _), (at, _) in sides)
        place = tuple((a - low, b - low) for (a, b), (low, _) in zip(part, box, strict=True))
        yield Window(source, place)
