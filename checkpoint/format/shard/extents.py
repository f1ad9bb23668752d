"""The bytes of a shard's entries in the order of the file, cut into segments of one write each.

Digest blocks begin anew with every entry, segments at multiples of their size, so a block may lie in two
segments. Hashed is the copy that is written, once each byte: what another thread does to the source
meanwhile may mix an entry, but never makes a block that differs from its digest.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import xxhash

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_digests, digests_of, first_blocks
from torchrelay.checkpoint.format.shard.batched_reads import AT_ONCE, all_dense, all_in_order, memories_of
from torchrelay.checkpoint.format.shard.entries import Data, Entries
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.checkpoint.storage.work import Seconds
from torchrelay.errors import BlobError
from torchrelay.records import dataclass

GATHER = BLOCK
"""Entries below this size are copied together into extents of about this size."""
PROBE = 4096
"""The first bytes of an entry of more than a block that have a digest of their own, in memory only."""
Bytes = TypeVar("Bytes", bytes, memoryview)


class Extent(NamedTuple):
    """Bytes that lie together in the file and in memory; `slot` counts the first of their digests.

    Those of an extent that needs `hashing` are of blocks that begin where it does.
    """

    data: memoryview
    slot: int
    hashing: bool


class Slice(NamedTuple):
    """A stretch of an extent."""

    extent: Extent
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """What one write takes: `nbytes` at `offset` of the file."""

    offset: int
    slices: tuple[Slice, ...]


class Digests:
    """The digests of all blocks of a part in the order of keys, as they become known in any order.

    `probes` are those of the first bytes of entries of more than a block, by key: a later save sees by
    them soonest that an entry has changed.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.probes: dict[str, bytes] = {}
        self._parts: dict[int, dict[int, bytes | memoryview]] = {}
        self._lock = threading.Lock()

    def hash(self, piece: Slice, copied: memoryview) -> None:
        """Hash a slice of one block at most, as it was `copied`."""
        extent, block = piece.extent, piece.start // BLOCK
        if not extent.hashing:
            return
        left = min(BLOCK, len(extent.data) - block * BLOCK)
        if len(copied) == left:
            self.put(extent.slot + block, block_digests(copied))
        else:
            self._hash_part(extent.slot + block, piece.start, copied, left)

    def _hash_part(self, slot: int, start: int, copied: memoryview, nbytes: int) -> None:
        """A part of a block of `nbytes`, which several threads copy: whoever comes last hashes them all."""
        with self._lock:
            parts = self._parts.setdefault(slot, {})
            if sum(map(len, parts.values())) + len(copied) < nbytes:
                parts[start] = bytes(copied)  # its place will be used again before the others have come
                return
            del self._parts[slot]
        parts[start] = copied
        hashed = xxhash.xxh3_128()
        for at in sorted(parts):
            hashed.update(parts[at])
        self.put(slot, hashed.digest())

    def put(self, slot: int, found: bytes) -> None:
        """Digests that follow one another."""
        self.data[slot * SIZE : slot * SIZE + len(found)] = found


def extents(entries: Entries, digests: Digests, seconds: Seconds) -> Iterator[Extent]:
    """The bytes of all entries; small ones are collected, and hashed, on the way.

    Raises BlobError for data that are not what the entry says.
    """
    ends, slots = list(accumulate(entries.sizes)), first_blocks(entries.sizes)
    for numbers in _runs(entries.sizes, ends):
        first = numbers.start
        if entries.sizes[first] < GATHER:
            yield _together(entries, numbers, slots[first], digests, seconds)
        else:
            yield _alone(entries, first, slots[first], digests)


def _runs(sizes: Sequence[int], ends: Sequence[int]) -> Iterator[range]:
    """Small entries that are gathered, up to the one that makes them enough; each large one alone."""
    large = [number for number, size in enumerate(sizes) if size >= GATHER]
    at = 0
    for stop in (*large, len(sizes)):
        while at < stop:
            enough = bisect_left(ends, ends[at] - sizes[at] + GATHER, at, stop) + 1
            yield range(at, min(enough, stop))
            at = min(enough, stop)
        if stop < len(sizes):
            yield range(stop, stop + 1)
            at = stop + 1


def _together(entries: Entries, numbers: range, slot: int, digests: Digests, seconds: Seconds) -> Extent:
    copied = memoryview(_copy(entries, numbers))
    with seconds.spent("hash"):
        edges = accumulate(entries.sizes[numbers.start : numbers.stop], initial=0)
        digests.put(slot, digests_of([copied[start:end] for start, end in pairwise(edges)]))
    return Extent(copied, slot, hashing=False)


def _copy(entries: Entries, numbers: range) -> bytes:
    """The bytes of small entries, one after another."""
    found: list[bytes] = []
    for at in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(at, min(at + AT_ONCE, numbers.stop))
        data = entries.data[some.start : some.stop]
        memories = data if entries.in_memory else _memories(data)
        if memories and list(map(len, memories)) == entries.sizes[some.start : some.stop]:
            found.append(b"".join(memories))
        else:
            found += [_small(entries, number) for number in some]
    return found[0] if len(found) == 1 else b"".join(found)


def _memories(data: Sequence[Data]) -> Sequence[Memory]:
    """The bytes of each where they lie in order; nothing where each has to be looked at."""
    return memories_of(data) if all_dense(data) and all_in_order(data) else ()


def _alone(entries: Entries, number: int, slot: int, digests: Digests) -> Extent:
    view = _bytes_of(entries, number)
    if len(view) > BLOCK:
        digests.probes[entries.keys[number]] = block_digests(view[:PROBE])
    return Extent(view, slot, hashing=True)


def segments(found: Iterable[Extent], offset: int, size: int) -> Iterator[Segment]:
    """Segments of `size` bytes from `offset` on, the last one perhaps shorter."""
    slices: list[Slice] = []
    room = size
    for extent in found:
        start = 0
        while start < len(extent.data):
            stop = min(len(extent.data), start + room)
            slices.append(Slice(extent, start, stop))
            room, start = room - (stop - start), stop
            if room == 0:
                yield Segment(offset, tuple(slices))
                slices, room, offset = [], size, offset + size
    if slices:
        yield Segment(offset, tuple(slices))


def blocks(segment: Segment) -> Iterator[Slice]:
    """The slices of a segment, cut where blocks begin: little enough to stay in the processor's cache."""
    for extent, begin, stop in segment.slices:
        start = begin
        while start < stop:
            end = min(stop, start - start % BLOCK + BLOCK)
            yield Slice(extent, start, end)
            start = end


def _small(entries: Entries, number: int) -> bytes:
    data = entries.data[number]
    if isinstance(data, memoryview):
        return bytes(_bytes_of(entries, number))
    return _of_right_size(dtypes.copied_bytes(data, entries.keys[number]), entries, number)


def _bytes_of(entries: Entries, number: int) -> memoryview:
    data = entries.data[number]
    if entries.in_memory:
        view = memoryview(data).cast("B")
    elif isinstance(data, memoryview):
        view = data.cast("B") if data.format != "B" else data
    else:
        view = dtypes.stored_bytes(data, entries.keys[number])
    return _of_right_size(view, entries, number)


def _of_right_size(data: Bytes, entries: Entries, number: int) -> Bytes:
    key, form = entries.keys[number], entries.forms[number]
    if len(data) != form.nbytes:
        raise BlobError(f"{key}: {len(data)} bytes were given for {form.dtype} of shape {list(form.shape)}")
    return data
