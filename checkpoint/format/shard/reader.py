"""Read a shard: whole blocks only, verified on arrival, straight into their destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from operator import sub

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_digests, first_damaged_block
from torchrelay.checkpoint.format.shard.entries import StoredEntry
from torchrelay.checkpoint.format.shard.header import LENGTH_LIMIT, ShardContent, header_length, parse
from torchrelay.checkpoint.format.shard.reads import (
    PLAIN,
    REMOTE_BYTES,
    EntryBatch,
    Passage,
    Passing,
    Portion,
    ReadOptions,
    ReadRequest,
    Span,
    ThreadMemory,
    batches,
    checked_target,
    in_order,
    neighbours,
    pieces,
    read_portions,
)
from torchrelay.checkpoint.storage.base import (
    Memory,
    ReadHandle,
    Storage,
    open_for_reading,
    worth_of_a_request,
)
from torchrelay.errors import DamagedError, MissingShardError, StorageError, UsageError
from torchrelay.records import dataclass

_Run = list[tuple[StoredEntry, ReadRequest]]
RUN = 2 * BLOCK
"""Bytes of a large entry that a thread reads into place at once; each block is verified then."""


@dataclass(frozen=True)
class ShardExpectation:
    """A manifest's data about a file; `header_bytes` counts everything before the data."""

    bytes: int
    header_bytes: int
    header_sha256: str


CHECKED = 4 * BLOCK
"""Bytes of an entry that a thread verifies at once, block by block in memory that stays in the cache."""
PASSING_REMOTE = 5 * BLOCK
"""Buffered bytes per request of a storage with high latency.

A thread keeps its memory during reads, and the storage needs as much for the answer; at most 64 MiB in
all.
"""


def read_header(
    storage: Storage, path: str, expect: ShardExpectation | None = None, *, vouched: bool = False
) -> ShardHeader:
    """Read and check everything before the data; no data are read.

    With `expect` the file's size and the header's SHA-256 are verified; otherwise only the header's
    consistency with itself and the file's size. `vouched` is passed to `parse`, and needs `expect`. Raises
    DamagedError for a file that is missing or differs, FormatError for another version's.
    """
    size = storage.stat(path)
    if size is None:
        raise MissingShardError(f"{path} is missing")
    if expect is None:
        header = _consistent(storage, path, size)
    elif size != expect.bytes:
        raise DamagedError(f"{path} has {size} bytes instead of {expect.bytes}")
    elif not 8 <= expect.header_bytes <= size:
        raise DamagedError(f"{path}: a header of {expect.header_bytes} bytes cannot be in {size} bytes")
    else:
        header = storage.read_range(path, 0, expect.header_bytes)
        if sha256(header) != expect.header_sha256:
            raise DamagedError(f"{path}: the header is not the one that was committed")
    content = parse(header, size, what=path, vouched=vouched and expect is not None)
    return ShardHeader(storage, path, content, block_digests(memoryview(header)))


def _consistent(storage: Storage, path: str, size: int) -> bytes:
    """The header, consistent with the file's size."""
    length = header_length(storage.read_range(path, 0, 8), size, what=path)
    if length > LENGTH_LIMIT + 8:
        raise DamagedError(f"{path}: the header cannot be {length - 8} bytes long")
    return storage.read_range(path, 0, length)


class ShardHeader:
    """A shard whose header was verified; returns verified bytes of its entries. One mismatch raises."""

    def __init__(self, storage: Storage, path: str, content: ShardContent, header_digests: bytes) -> None:
        self.path = path
        self.content = content
        self.entries = content.entries
        self.aliases = content.aliases
        self.values = content.values
        self._header_digests = header_digests
        self._storage = storage
        self._gap = worth_of_a_request(storage)
        self._run = REMOTE_BYTES if self._gap else RUN
        self.is_remote = self._gap > 0
        """Whether reads go over a network, request by request."""

    def read_into(self, key: str, start_byte: int, stop_byte: int, destination: memoryview) -> None:
        """Fill `destination` with bytes [start_byte, stop_byte) of an entry.

        Whole blocks are read and verified. Those inside the range go straight to the destination, at most two
        others through 1 MiB of memory. After an error the destination is undefined. Raises DamagedError
        naming file, key and block.
        """
        with open_for_reading(self._storage, self.path) as handle:
            self._read_one(ReadRequest(key, start_byte, stop_byte, destination), True, handle)

    def _read_one(self, request: ReadRequest, verify: bool, handle: ReadHandle) -> None:
        key, start_byte, stop_byte = request.key, request.start, request.stop
        entry = self.entry(key)
        target = checked_target(entry, request)
        if not verify:
            self._read_range(handle, key, entry, False, start_byte, target)
            return
        position = start_byte
        while position < stop_byte:
            first = position // BLOCK * BLOCK
            inside = min(stop_byte, first + (self._run if self._gap else BLOCK))
            whole_end = entry.nbytes if inside == entry.nbytes else inside // BLOCK * BLOCK
            if position == first and whole_end > first:
                part = target[first - start_byte : whole_end - start_byte]
                self._read_verified(handle, key, entry, first, part)
                position = whole_end
            else:  # to the end of the block or of the request
                block = memoryview(bytearray(min(BLOCK, entry.nbytes - first)))
                self._read_verified(handle, key, entry, first, block)
                end = min(stop_byte, first + len(block))
                target[position - start_byte : end - start_byte] = block[position - first : end - first]
                position = end

    def read_many(self, requests: Iterable[ReadRequest], options: ReadOptions = PLAIN) -> None:
        """Do many reads, begun in file order; small neighbouring entries are read together."""
        found = self.portions(requests, options)
        read_portions(found, sum(one.nbytes for one in found), options)

    def portions(self, requests: Iterable[ReadRequest], options: ReadOptions = PLAIN) -> list[Portion]:
        """The portions of `read_many`; raises UsageError and DamagedError as it does."""
        parts: list[ReadRequest] = []
        whole: list[ReadRequest] = []
        for request in requests:
            size = request.destination.nbytes
            small = self.entries.in_columns and request.start == 0 and size == request.stop <= BLOCK
            (whole if small and self.entry(request.key).nbytes == size else parts).append(request)
        found: list[Portion] = []
        if whole:
            numbers = self._numbers([request.key for request in whole])
            memories = [request.destination.cast("B") for request in whole]
            filled = [number for number, one in zip(numbers, memories, strict=True) if len(one)]
            found += self._small_portions(*in_order(filled, list(filter(len, memories))), options)
        pieced = (piece for request in parts for piece in pieces(request, self._run))
        located = [(self.entry(piece.key), piece) for piece in pieced]
        # By the end, too: an empty entry begins where the next one does, and comes before it.
        located.sort(key=lambda pair: (pair[0].start, pair[0].stop, pair[1].start))
        for run in neighbours(located):
            (first, begin), (last, end) = run[0], run[-1]
            at = first.start + begin.start
            read = partial(self._read_run, run, options.verify)
            found.append(self.portion(at, last.start + end.stop - at, read))
        return found

    def portion(self, begin: int, nbytes: int, read: Callable[[ReadHandle], None]) -> Portion:
        """Bytes of this file, from byte `begin` on, that `read` reads at once."""
        return Portion(self._storage, self.path, begin, nbytes, read)

    def read_whole(
        self, keys: Sequence[str], memories: Sequence[Memory], options: ReadOptions = PLAIN
    ) -> None:
        """Fill the memory of each key with its whole entry, much faster than `read_many` for small ones."""
        if not self.entries.in_columns:
            pairs = zip(keys, memories, strict=True)
            self.read_many([ReadRequest(key, 0, len(one), memoryview(one)) for key, one in pairs], options)
            return
        numbers, memories = in_order(self._numbers(keys), memories)
        starts, stops = self.entries.stored.bounds(numbers)
        stored, sizes = list(map(sub, stops, starts)), list(map(len, memories))
        if stored != sizes:
            number, size, room = next(
                one for one in zip(numbers, stored, sizes, strict=True) if one[1] != one[2]
            )
            raise UsageError(
                f"{self.entries.key_at(number)}, which has {size} bytes, does not fit into {room}"
            )
        if max(sizes, default=0) > BLOCK:
            self.read_many(
                [
                    ReadRequest(self.entries.key_at(number), 0, size, memoryview(memory))
                    for number, size, memory in zip(numbers, sizes, memories, strict=True)
                    if size > BLOCK
                ],
                options,
            )
        if min(sizes, default=1) == 0 or max(sizes, default=0) > BLOCK:
            small = [0 < size <= BLOCK for size in sizes]
            numbers, memories = list(compress(numbers, small)), list(compress(memories, small))
        found = self._small_portions(numbers, memories, options)
        read_portions(found, sum(one.nbytes for one in found), options)

    def checks(self, requests: Iterable[ReadRequest], memory: ThreadMemory) -> list[Portion]:
        """Portions that verify every block of these bytes once; the destinations are ignored."""
        spans: dict[str, list[Span]] = {}
        for one in requests:
            if not 0 <= one.start <= one.stop <= self.entry(one.key).nbytes:
                raise UsageError(f"{one.key} has no bytes {one.start} to {one.stop}")
            if one.start < one.stop:
                spans.setdefault(one.key, []).append((one.start // BLOCK, -(-one.stop // BLOCK)))
        small = [key for key in spans if self.entries.in_columns and self.entry(key).nbytes <= BLOCK]
        found = self.checks_whole(small, memory) if small else []
        for key in spans.keys() - set(small):
            entry = self.entry(key)
            for first, after in _joined(spans[key]):
                for at in range(first * BLOCK, min(after * BLOCK, entry.nbytes), CHECKED):
                    stop = min(at + CHECKED, after * BLOCK, entry.nbytes)
                    check = partial(self._check_blocks, key, entry, at, stop, memory)
                    found.append(self.portion(entry.start + at, stop - at, check))
        return found

    def checks_whole(self, keys: Sequence[str], memory: ThreadMemory) -> list[Portion]:
        """The same for whole entries, much faster for many small ones."""
        if not self.entries.in_columns:
            whole = [ReadRequest(key, 0, self.entry(key).nbytes, memoryview(b"")) for key in keys]
            return self.checks(whole, memory)
        wanted = set(self._numbers(keys))
        numbers = range(len(self.entries)) if len(wanted) == len(self.entries) else sorted(wanted)
        starts, stops = self.entries.stored.bounds(numbers)
        sizes = list(map(sub, stops, starts))
        large = [self.entries.key_at(one) for one, size in zip(numbers, sizes, strict=True) if size > BLOCK]
        whole = [ReadRequest(key, 0, self.entry(key).nbytes, memoryview(b"")) for key in large]
        found = self.checks(whole, memory) if large else []
        small = list(compress(numbers, [0 < size <= BLOCK for size in sizes]))

        def check(batch: EntryBatch, handle: ReadHandle) -> None:
            batch.check(handle.read_into, memory.room(batch.nbytes))

        for one in batches(self.path, self.entries, small):
            found.append(self.portion(one.start, one.nbytes, partial(check, one)))
        return found

    def _check_blocks(
        self, key: str, entry: StoredEntry, start: int, stop: int, memory: ThreadMemory, handle: ReadHandle
    ) -> None:
        room = memory.room(BLOCK)
        for at in range(start, stop, BLOCK):
            self._read_verified(handle, key, entry, at, room[: min(BLOCK, stop - at)])

    def read_passing(
        self, handle: ReadHandle, key: str, spans: Sequence[Span], memory: Passing, options: ReadOptions
    ) -> Iterator[memoryview]:
        """Verified bytes of ascending spans of an entry, each valid until the next is requested."""
        entry = self.entry(key)
        for start, stop in spans:
            if not 0 <= start <= stop <= entry.nbytes:
                raise UsageError(f"{key}, which has {entry.nbytes} bytes, has no bytes {start} to {stop}")
        passage = Passage(
            entry.nbytes, BLOCK if options.verify else 1, PASSING_REMOTE if self._gap else 0, self._gap
        )
        return memory.over(spans, passage, partial(self._read_range, handle, key, entry, options.verify))

    def _small_portions(
        self, numbers: Sequence[int], memories: Sequence[Memory], options: ReadOptions
    ) -> list[Portion]:
        """Whole entries in file order, none empty or larger than a block."""

        def read(batch: EntryBatch, handle: ReadHandle) -> None:
            batch.read(handle.read_scattered, verify=options.verify)

        return [
            self.portion(one.start, one.nbytes, partial(read, one))
            for one in batches(self.path, self.entries, numbers, memories, self._gap)
        ]

    def _numbers(self, keys: Sequence[str]) -> Sequence[int]:
        try:
            return self.entries.numbers(keys)
        except KeyError as error:
            raise DamagedError(f"{self.path} does not hold {error.args[0]}") from None

    def _read_run(self, run: _Run, verify: bool, handle: ReadHandle) -> None:
        """Read neighbours in the file together, or one piece of a large entry."""
        if len(run) == 1:
            self._read_one(run[0][1], verify, handle)
            return
        start, stop = run[0][0].start, run[-1][0].stop
        window = memoryview(bytearray(stop - start))
        self._fill(handle, run[-1][1].key, start, window)
        for entry, request in run:
            view = window[entry.start - start : entry.stop - start]
            target = checked_target(entry, request)
            if verify:
                self._verify(request.key, entry, 0, view)
            target[:] = view[request.start : request.stop]

    def check(self, request: ReadRequest) -> None:
        """Verify bytes in the destination: whole blocks, the last may be the entry's end.

        Raises DamagedError.
        """
        entry = self.entry(request.key)
        self._verify(request.key, entry, request.start, checked_target(entry, request))

    def read(self, key: str) -> bytearray:
        """All bytes of an entry, verified, in new memory."""
        data = bytearray(self.entry(key).nbytes)
        self.read_into(key, 0, len(data), memoryview(data))
        return data

    def check_in_place(self) -> None:
        """Raise DamagedError if the path has another file now: for reads that verify no block."""
        size = self._storage.stat(self.path)
        header = b"" if size is None else _consistent(self._storage, self.path, size)
        if block_digests(memoryview(header)) != self._header_digests:
            raise DamagedError(f"{self.path} was replaced while it was read: read it again")

    def verify(self) -> int:
        """Verify all data in bounded memory; returns the number of bytes. Leaves the page cache as it was."""
        scratch = memoryview(
            bytearray(min(self._run, max((e.nbytes for e in self.entries.values()), default=0)))
        )
        with open_for_reading(self._storage, self.path) as handle:
            for key, entry in self.entries.items():
                for start in range(0, entry.nbytes, self._run):
                    part = scratch[: min(self._run, entry.nbytes - start)]
                    self._read_verified(handle, key, entry, start, part, once=True)
        if self._storage.stat(self.path) != self.content.file_bytes:
            raise DamagedError(f"{self.path} changed its size while it was read")
        return sum(entry.nbytes for entry in self.entries.values())

    def entry(self, key: str) -> StoredEntry:
        """The entry under a key; raises DamagedError for a missing one."""
        try:
            return self.content.entries[key]
        except KeyError:
            raise DamagedError(f"{self.path} does not hold {key}") from None

    def _read_range(
        self, handle: ReadHandle, key: str, entry: StoredEntry, verify: bool, first: int, target: memoryview
    ) -> None:
        """Read from byte `first` on; blocks are verified when they arrive."""
        for at in range(0, len(target), self._run):
            part = target[at : at + self._run]
            self._fill(handle, key, entry.start + first + at, part)
            if verify:
                self._verify(key, entry, first + at, part)

    def _read_verified(
        self,
        handle: ReadHandle,
        key: str,
        entry: StoredEntry,
        first: int,
        target: memoryview,
        *,
        once: bool = False,
    ) -> None:
        self._fill(handle, key, entry.start + first, target, once=once)
        self._verify(key, entry, first, target)

    def _fill(
        self, handle: ReadHandle, key: str, offset: int, target: memoryview, *, once: bool = False
    ) -> None:
        try:
            count = handle.read_into(offset, target, once=once)
        except StorageError as error:
            raise type(error)(f"{error} (reading {key})") from error
        if count != len(target):
            raise DamagedError(f"{self.path} ends inside of {key}, at byte {offset + count}")

    def _verify(self, key: str, entry: StoredEntry, first: int, view: memoryview) -> None:
        block = first // BLOCK
        count = -(-len(view) // BLOCK)
        damaged = first_damaged_block(view, entry.digests[block * SIZE : (block + count) * SIZE])
        if damaged is not None:
            offset = entry.start + (block + damaged) * BLOCK
            raise DamagedError(
                f"{self.path}: block {block + damaged} of {key}, at byte {offset} of the file,"
                " is not what was saved"
            )


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans in order, adjacent ones merged."""
    first, after = -1, -1
    for start, stop in sorted(spans):
        if start > after:
            if first >= 0:
                yield first, after
            first, after = start, stop
        after = max(after, stop)
    if first >= 0:
        yield first, after
