"""Write shards: data first, in segments, hashed on the way, then the header, then sync.

Digest blocks restart with every entry, segments are at multiples of their size, so a block may be in two
segments. The written copy is hashed, each byte once: a concurrent change of the source may mix an entry, but
never makes a block that differs from its digest.

The buffers of a process are allocated on demand and kept for the next save. There are at most `LIMIT`; a
thread that needs one more waits without holding any. A child after `fork` begins with none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import xxhash

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.dtypes import (
    AT_ONCE,
    BLOCK,
    SIZE,
    all_dense,
    all_in_order,
    block_digests,
    digests_of,
    first_blocks,
    memories_at,
)
from torchrelay.checkpoint.format.names import Key, ShardName, shard_file_name
from torchrelay.checkpoint.format.shard.entries import Entries
from torchrelay.checkpoint.format.shard.header import (
    DEFAULT_LIMITS,
    HeaderFrame,
    ShardIdentity,
    ShardLimits,
    ShardPart,
    cut,
)
from torchrelay.checkpoint.storage.base import Memory, Storage, WriteHandle
from torchrelay.checkpoint.storage.work import WRITERS, Clock, share
from torchrelay.errors import BlobError, StorageError
from torchrelay.records import Json, dataclass

GATHER = BLOCK
"""Entries below this size are copied together into extents of about this size."""
PROBE = 4096
"""The first bytes of an entry of more than a block that have a separate digest, in memory only."""


class Extent(NamedTuple):
    """Bytes contiguous in the file and in memory; `slot` is the index of the first digest."""

    data: memoryview
    slot: int
    hashing: bool


class Slice(NamedTuple):
    """A part of an extent."""

    extent: Extent
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """One write at `offset` of the file."""

    offset: int
    slices: tuple[Slice, ...]


class Digests:
    """The digests of all blocks of a part, filled in any order; `probes` are those of first bytes, by key."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.probes: dict[str, bytes] = {}
        self._parts: dict[int, dict[int, bytes | memoryview]] = {}
        self._lock = threading.Lock()

    def hash(self, piece: Slice, copied: memoryview) -> None:
        """Hash a slice of at most one block, from its copy."""
        extent, block = piece.extent, piece.start // BLOCK
        if not extent.hashing:
            return
        left = min(BLOCK, len(extent.data) - block * BLOCK)
        slot = extent.slot + block
        if len(copied) == left:
            self.put(slot, block_digests(copied))
            return
        with self._lock:  # of the threads that copy parts of a block the last one hashes it
            parts = self._parts.setdefault(slot, {})
            if sum(map(len, parts.values())) + len(copied) < left:
                parts[piece.start] = bytes(copied)  # its memory is reused before the others finish
                return
            del self._parts[slot]
        parts[piece.start] = copied
        hashed = xxhash.xxh3_128()
        for at in sorted(parts):
            hashed.update(parts[at])
        self.put(slot, hashed.digest())

    def put(self, slot: int, found: bytes) -> None:
        """Store consecutive digests."""
        self.data[slot * SIZE : slot * SIZE + len(found)] = found


def extents(entries: Entries, digests: Digests, seconds: Clock) -> Iterator[Extent]:
    """The bytes of all entries, small ones collected and hashed; raises BlobError for another size."""
    ends, slots = list(accumulate(entries.sizes)), first_blocks(entries.sizes)
    for numbers in _runs(entries.sizes, ends):
        first = numbers.start
        if entries.sizes[first] < GATHER:
            copied = memoryview(_copy(entries, numbers))
            with seconds.spent("hash"):
                edges = accumulate(entries.sizes[first : numbers.stop], initial=0)
                digests.put(slots[first], digests_of([copied[start:end] for start, end in pairwise(edges)]))
            yield Extent(copied, slots[first], hashing=False)
        else:
            view = _bytes_of(entries, first)
            if len(view) > BLOCK:
                digests.probes[entries.keys[first]] = block_digests(view[:PROBE])
            yield Extent(view, slots[first], hashing=True)


def _runs(sizes: Sequence[int], ends: Sequence[int]) -> Iterator[range]:
    """Small entries that are collected up to the limit; each large one alone."""
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


def _copy(entries: Entries, numbers: range) -> bytes:
    found: list[bytes] = []
    for at in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(at, min(at + AT_ONCE, numbers.stop))
        data = entries.data[some.start : some.stop]
        memories: Sequence[Memory] = data if entries.kept is not None else ()
        if entries.kept is None and all_dense(data) and all_in_order(data):
            # The bytes of each, valid as long as the tensors are alive.
            import torch

            sizes = list(map(attrgetter("nbytes"), data))
            memories = memories_at(list(map(torch.Tensor.data_ptr, data)), sizes)
        if not memories or list(map(len, memories)) != entries.sizes[some.start : some.stop]:
            memories = [_bytes_of(entries, number) for number in some]
        found.append(b"".join(memories))
    return found[0] if len(found) == 1 else b"".join(found)


def segments(found: Iterable[Extent], offset: int, size: int) -> Iterator[Segment]:
    """Segments of `size` bytes from `offset` on, the last one maybe shorter."""
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
    """The slices of a segment, cut at block borders, so that they stay in the processor's cache."""
    for extent, begin, stop in segment.slices:
        start = begin
        while start < stop:
            end = min(stop, start - start % BLOCK + BLOCK)
            yield Slice(extent, start, end)
            start = end


def _bytes_of(entries: Entries, number: int) -> memoryview:
    data, key, form = entries.data[number], entries.keys[number], entries.forms[number]
    if entries.kept is not None or isinstance(data, memoryview):
        view = memoryview(data).cast("B")
    else:
        view = dtypes.stored_bytes(data, key)
    if len(view) != form.nbytes:
        raise BlobError(f"{key}: {len(view)} bytes were given for {form.dtype} of shape {list(form.shape)}")
    return view


BOUNCE_SIZE = 4 << 20
"""Bytes of a buffer, and of a write."""
LIMIT = 8
"""Buffers per process: 32 MiB."""
_SMALL = 64 << 10
_byte = ctypes.c_char


class Pool:
    """The write buffers of one process."""

    def __init__(self, size: int = BOUNCE_SIZE, limit: int = LIMIT) -> None:
        self._size = size
        self._free: list[mmap.mmap] = []
        self._limit, self._made = limit, 0
        self._left = threading.Semaphore(limit)

    def touch(self, count: int) -> None:
        """Allocate so many buffers in advance, those in use included; raises StorageError without memory."""
        while self._made < min(count, self._limit):
            memory = self._new()
            # Avoids page faults later; without the GIL.
            ctypes.memset(ctypes.addressof(_byte.from_buffer(memory)), 0, len(memory))
            self._free.append(memory)

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Page-aligned writable bytes with undefined content, for this thread alone."""
        with self._left:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = self._new()
            try:
                yield memoryview(memory)
            finally:
                self._free.append(memory)

    def _new(self) -> mmap.mmap:
        try:
            memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageError(
                f"no memory for a buffer of {self._size} bytes to write from: free some"
            ) from error
        with suppress(OSError, AttributeError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._made += 1
        return memory


_of_process: dict[int, Pool] = {}


def pool() -> Pool:
    """The pool of this process."""
    return _of_process.setdefault(os.getpid(), Pool())


def copy(room: memoryview, at: int, data: memoryview) -> int:
    """Copy bytes into a buffer; without the GIL if writable, so pass at most a block of read-only ones."""
    if data.readonly or len(data) < _SMALL:
        room[at : at + len(data)] = data
    else:
        source, target = _byte.from_buffer(data), _byte.from_buffer(room, at)
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), len(data))
    return len(data)


def fill(handle: WriteHandle, part: ShardPart, frame: HeaderFrame, seconds: Clock, writers: int) -> Digests:
    """Write the data of a part after the space for its header; returns the digests.

    If the handle needs aligned memory, `writers` threads take segments in turn; otherwise this thread writes
    in order. All have ended when this returns. Raises BlobError and StorageError; the file is then
    incomplete.
    """
    digests, clocks = Digests(frame.digest_bytes), [Clock()]
    writers = writers if handle.alignment else 1

    def write(todo: Iterator[Segment]) -> None:
        clocks.append(own := Clock())
        with pool().buffer() as room:
            for segment in todo:
                at = 0
                for piece in blocks(segment):
                    with own.spent("write"):
                        end = at + copy(room, at, piece.extent.data[piece.start : piece.stop])
                    with own.spent("hash"):
                        digests.hash(piece, room[at:end])
                    at = end
                with own.spent("write"):
                    handle.write_at(segment.offset, room[:at])

    source = extents(part.entries, digests, clocks[0])
    share(write, segments(source, frame.nbytes, BOUNCE_SIZE), writers)
    seconds.add_mean(clocks, writers)
    return digests


BlockDigests = bytes
"""Digests of blocks, concatenated; an alias, because a report has a field `bytes`."""


@dataclass(frozen=True)
class ShardReport:
    """One written file: data for the manifest, and times.

    `header_bytes` counts all bytes before the data (including length field and padding), and `header_sha256`
    covers exactly these. `keys` are in stored order, `blocks` the number of blocks of each, `hashed` all
    digests, concatenated; `probes` those of the first `PROBE` bytes of long ones.
    """

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str
    keys: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    hashed: BlockDigests = field(default=b"", compare=False)
    probes: Mapping[str, BlockDigests] = field(default_factory=dict, compare=False)
    seconds: Clock = field(default_factory=Clock, compare=False)
    """Seconds of `hash`, `write` and `fsync`; copies to aligned memory count as writing."""

    @cached_property
    def digests(self) -> tuple[BlockDigests, ...]:
        """The digests of each entry."""
        edges = accumulate([SIZE * count for count in self.blocks], initial=0)
        return tuple([self.hashed[start:end] for start, end in pairwise(edges)])


def write_shard(
    storage: Storage,
    directory: str,
    identity: ShardIdentity,
    entries: Entries,
    *,
    values: Mapping[str, Json],
    aliases: Mapping[str, Key] | None = None,
    limits: ShardLimits = DEFAULT_LIMITS,
    writers: int = WRITERS,
) -> list[ShardReport]:
    """Write the files of one node and group into an attempt's directory, each synced; one report per file.

    `values` are encoded already (`values.encode`) and are in part 1; `aliases` maps names of tied leaves to
    the key that holds their bytes. At most `writers` threads write a file. The directory is not synced: call
    `storage.sync_dir` once after all shards. Raises BlobError for what cannot be stored and StorageError for
    failed writes; incomplete files are then deleted if possible.
    """
    folder = f"{directory}/" if directory else ""
    found = []
    for part in cut(identity, entries, values, aliases or {}, limits):
        name = ShardName(identity.node, identity.position, identity.group, part.number)
        found.append(write_part(storage, f"{folder}{shard_file_name(name)}", part, writers))
    return found


def write_part(storage: Storage, path: str, part: ShardPart, writers: int = WRITERS) -> ShardReport:
    """Write and sync one new file; raises as `write_shard` does, and leaves nothing behind then."""
    seconds = Clock()
    try:
        handle = storage.open_exclusive(path)
    except FileExistsError:
        raise StorageError(f"{path} exists already: attempts are written once; begin a new one") from None
    try:
        frame = HeaderFrame(part)
        with seconds.spent("write"):
            handle.preallocate(frame.nbytes + frame.data_bytes)
        found = fill(handle, part, frame, seconds, writers)
        header = frame.filled(bytes(found.data))
        with seconds.spent("write"):
            handle.write_at(0, memoryview(header))
        with seconds.spent("fsync"):
            handle.sync_file()
            handle.close()
    except BaseException:
        with suppress(StorageError):
            handle.close()
        with suppress(StorageError):
            storage.delete(path)
        raise
    return ShardReport(
        path,
        len(header) + part.data_bytes,
        len(header),
        sha256(header),
        tuple(part.entries.keys),
        tuple([form.blocks for form in part.entries.forms]),
        bytes(found.data),
        found.probes,
        seconds,
    )
