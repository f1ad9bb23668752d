"""Shards are written data first, hashed on the way, the header last, then synced.

The buffers of a process are made when first needed and kept for the next save. There are never more than
`LIMIT`; whoever needs one more waits, holding none. A child after `fork` begins with none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from itertools import accumulate, pairwise

from torchrelay.checkpoint.format.canonical_json import Json, sha256
from torchrelay.checkpoint.format.dtypes import SIZE
from torchrelay.checkpoint.format.names import Key, shard_file_name
from torchrelay.checkpoint.format.shard.entries import Entries
from torchrelay.checkpoint.format.shard.extents import Digests, Segment, blocks, extents, segments
from torchrelay.checkpoint.format.shard.layout import (
    DEFAULT_LIMITS,
    HeaderFrame,
    Part,
    ShardIdentity,
    ShardLimits,
    cut,
)
from torchrelay.checkpoint.format.utils import lazily
from torchrelay.checkpoint.storage.base import Storage, WriteHandle
from torchrelay.checkpoint.storage.work import WRITERS, Seconds, share
from torchrelay.errors import StorageError
from torchrelay.records import dataclass

BOUNCE_SIZE = 4 << 20
"""Bytes of a buffer, and of a write."""
LIMIT = 8
"""Buffers per process: 32 MiB."""
_SMALL = 64 << 10
_byte = ctypes.c_char


class Pool:
    """The buffers of one process."""

    def __init__(self, size: int = BOUNCE_SIZE, limit: int = LIMIT) -> None:
        self._size = size
        self._free: list[mmap.mmap] = []
        self._limit, self._made = limit, 0
        self._left = threading.Semaphore(limit)

    def touch(self, count: int) -> None:
        """Have so many buffers made, so that the first save need not wait for fresh memory.

        Those in use count, too. Raises StorageError where there is no memory.
        """
        while self._made < min(count, self._limit):
            memory = self._new()
            # Costs no page faults later; without the interpreter's lock.
            ctypes.memset(ctypes.addressof(_byte.from_buffer(memory)), 0, len(memory))
            self._free.append(memory)

    def _new(self) -> mmap.mmap:
        memory = _mapped(self._size)
        self._made += 1
        return memory

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Page-aligned writable bytes with unknown content, for this thread alone."""
        with self._left:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = self._new()
            try:
                yield memoryview(memory)
            finally:
                self._free.append(memory)


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(f"no memory for a buffer of {nbytes} bytes to write from: free some") from error
    with suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_of_process: dict[int, Pool] = {}


def pool() -> Pool:
    """The pool of this process."""
    return _of_process.setdefault(os.getpid(), Pool())


def copy(room: memoryview, at: int, data: memoryview) -> int:
    """Copy bytes to a place of a buffer, without the interpreter's lock where they are writable.

    Read-only bytes hold it, so give no more than a block at a time. Returns how many they were.
    """
    if data.readonly or len(data) < _SMALL:
        room[at : at + len(data)] = data
    else:
        source, target = _byte.from_buffer(data), _byte.from_buffer(room, at)
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), len(data))
    return len(data)


def fill(handle: WriteHandle, part: Part, frame: HeaderFrame, seconds: Seconds, writers: int) -> Digests:
    """Write the data of a part behind its header's place and return what was hashed.

    Where the handle wants aligned memory, `writers` threads take segments in turn, else this one alone and in
    order; all have ended when this returns. Raises BlobError and StorageError; the file is then not whole.
    """
    filling = _Filling(handle, frame.digest_bytes)
    own, writers = Seconds(), writers if handle.alignment else 1
    source = extents(part.entries, filling.digests, own)
    share(filling.write, segments(source, frame.nbytes, BOUNCE_SIZE), writers)
    seconds.add_mean([own, *filling.seconds], writers)
    return filling.digests


class _Filling:
    """One file on its way; what several threads work on."""

    def __init__(self, handle: WriteHandle, digest_bytes: int) -> None:
        self.digests = Digests(digest_bytes)
        self.seconds: list[Seconds] = []
        self._handle = handle

    def _clock(self) -> Seconds:
        seconds = Seconds()
        self.seconds.append(seconds)
        return seconds

    def write(self, todo: Iterator[Segment]) -> None:
        """Copy a segment together in aligned memory, block by block; hash and write that."""
        seconds = self._clock()
        with pool().buffer() as room:
            for segment in todo:
                at = 0
                for piece in blocks(segment):
                    with seconds.spent("write"):
                        end = at + copy(room, at, piece.extent.data[piece.start : piece.stop])
                    with seconds.spent("hash"):
                        self.digests.hash(piece, room[at:end])
                    at = end
                with seconds.spent("write"):
                    self._handle.write_at(segment.offset, room[:at])


BlockDigests = bytes
"""Of blocks, one after another; a name, because a report has a field `bytes`."""


@dataclass(frozen=True)
class ShardReport:
    """One written file: what a manifest needs to know, and where the time went.

    `header_bytes` counts all bytes before the data (the length field and the padding too), and
    `header_sha256` is of exactly these; `keys` are in stored order, `blocks` how many each has, `hashed`
    the digests of all, one after another; `probes` those of the first `PROBE` bytes of long ones.
    """

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str
    keys: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    hashed: BlockDigests = field(default=b"", compare=False)
    probes: Mapping[str, BlockDigests] = field(default_factory=dict, compare=False)
    seconds: Seconds = field(default_factory=Seconds, compare=False)

    @lazily
    def digests(self) -> tuple[BlockDigests, ...]:
        """Those of each entry."""
        edges = accumulate([SIZE * count for count in self.blocks], initial=0)
        return tuple([self.hashed[start:end] for start, end in pairwise(edges)])


def write_shard(
    storage: Storage,
    directory: str,
    identity: ShardIdentity,
    entries: Entries,
    *,
    values: Mapping[str, Json] | None = None,
    aliases: Mapping[str, Key] | None = None,
    limits: ShardLimits = DEFAULT_LIMITS,
    escape: str = "",
    writers: int = WRITERS,
) -> list[ShardReport]:
    """Write the files of one node and group into a try directory, each synced; one report per file.

    `values` are encoded already (`values.encode`) and lie in part 1; `aliases` maps names of tied
    leaves to the key that holds their bytes. At most `writers` threads write a file. The directory's
    entry is not synced: do that once after all shards (`storage.sync_dir`). Raises BlobError for what
    cannot be stored and StorageError for what could not be written; files that were begun are then
    removed where possible.
    """
    parts = cut(identity, entries, values or {}, aliases or {}, limits)
    return [write_part(storage, _path_of(part, directory, escape), part, writers) for part in parts]


def _path_of(part: Part, directory: str, escape: str) -> str:
    name = shard_file_name(part.identity.file(part.number), escape=escape)
    return f"{directory}/{name}" if directory else name


def write_part(storage: Storage, path: str, part: Part, writers: int = WRITERS) -> ShardReport:
    """Write and sync one new file; raises as `write_shard` does, and leaves nothing behind then."""
    seconds = Seconds()
    try:
        handle = storage.open_exclusive(path)
    except FileExistsError:
        raise StorageError(f"{path} exists already: a try is written once; begin a new try") from None
    try:
        header, found = _fill(handle, part, seconds, writers)
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


def _fill(handle: WriteHandle, part: Part, seconds: Seconds, writers: int) -> tuple[bytes, Digests]:
    frame = HeaderFrame(part)
    with seconds.spent("write"):
        handle.preallocate(frame.nbytes + frame.data_bytes)
    found = fill(handle, part, frame, seconds, writers)
    header = frame.filled(bytes(found.data))
    with seconds.spent("write"):
        handle.write_at(0, memoryview(header))
    return header, found
