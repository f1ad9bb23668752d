"""The bytes of a shard's entries in the order of the file, cut into segments of one write each.

Digest blocks begin anew with every entry, segments at multiples of their size, so a block may lie in two
segments. Hashed is the copy that is written, once each byte: what another thread does to the source
meanwhile may mix an entry, but never makes a block that differs from its digest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import xxhash

from torchrelay.checkpoint.disk import dtypes
from torchrelay.checkpoint.disk.digest import BLOCK, SIZE, block_count, block_digests, digests_of
from torchrelay.checkpoint.disk.many_tensors import AT_ONCE, all_dense, all_in_order, memories_of
from torchrelay.checkpoint.disk.seconds import Seconds
from torchrelay.checkpoint.disk.shard import ShardEntry
from torchrelay.errors import BlobError

GATHER = BLOCK
"""Entries below this size are copied together into extents of about this size."""
PROBE = 4096
"""The first bytes of an entry of more than a block that have a digest of their own, in memory only."""
Data = TypeVar("Data", bytes, memoryview)


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


def extents(entries: Sequence[ShardEntry], digests: Digests, seconds: Seconds) -> Iterator[Extent]:
    """The bytes of all entries; small ones are collected, and hashed, on the way.

    Raises BlobError for data that are not what the entry says.
    """
    gathered: list[ShardEntry] = []
    room, slot, first = GATHER, 0, 0
    for entry in entries:
        if entry.nbytes < GATHER:
            gathered.append(entry)
            slot += entry.nbytes > 0
            room -= entry.nbytes
            if room > 0:
                continue
        if gathered:
            yield _together(gathered, first, digests, seconds)
        if entry.nbytes >= GATHER:
            yield _alone(entry, slot, digests)
            slot += block_count(entry.nbytes)
        gathered, room, first = [], GATHER, slot
    if gathered:
        yield _together(gathered, first, digests, seconds)


def _together(gathered: list[ShardEntry], slot: int, digests: Digests, seconds: Seconds) -> Extent:
    copied = memoryview(_copy(gathered))
    with seconds.spent("hash"):
        ends = list(accumulate([entry.nbytes for entry in gathered]))
        digests.put(
            slot, digests_of([copied[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        )
    return Extent(copied, slot, hashing=False)


def _copy(gathered: Sequence[ShardEntry]) -> bytes:
    """The bytes of small entries, one after another."""
    found: list[bytes] = []
    for at in range(0, len(gathered), AT_ONCE):
        some = gathered[at : at + AT_ONCE]
        tensors = [entry.data for entry in some]
        if all_dense(tensors) and all_in_order(tensors):
            memories = memories_of(tensors)
            if list(map(len, memories)) == [entry.nbytes for entry in some]:
                found.append(b"".join(memories))
                continue
        found += map(_small, some)
    return found[0] if len(found) == 1 else b"".join(found)


def _alone(entry: ShardEntry, slot: int, digests: Digests) -> Extent:
    view = _bytes_of(entry)
    if entry.nbytes > BLOCK:
        digests.probes[entry.text] = block_digests(view[:PROBE])
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


def _small(entry: ShardEntry) -> bytes:
    if isinstance(entry.data, memoryview):
        return bytes(_bytes_of(entry))
    return _of_right_size(dtypes.copied_bytes(entry.data, entry.text), entry)


def _bytes_of(entry: ShardEntry) -> memoryview:
    if isinstance(entry.data, memoryview):
        view = entry.data.cast("B") if entry.data.format != "B" else entry.data
    else:
        view = dtypes.stored_bytes(entry.data, entry.text)
    return _of_right_size(view, entry)


def _of_right_size(data: Data, entry: ShardEntry) -> Data:
    if len(data) != entry.nbytes:
        raise BlobError(
            f"{entry.text}: {len(data)} bytes were given for {entry.dtype} of shape {list(entry.piece_shape)}"
        )
    return data
