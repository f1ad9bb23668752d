"""Plan the reads of a shard: portions and threads; many small entries together.

- Opening a file resolves every part of its path, which takes as long as reading some hundred KiB.
- Some threads wait for the device or copy from the kernel while another verifies.
- With many small tensors the work per entry dominates, so entries are only handled one by one after an error.
- Bytes that are read, verified and copied at once stay in the processor's cache; `AT_ONCE` bounds the tensors
  per built-in call for the same reason. Figures are in benchmarks/README.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, suppress
from itertools import chain, islice, pairwise
from typing import NamedTuple, TypeVar

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, digests_of
from torchrelay.checkpoint.format.shard.entries import StoredColumns, StoredEntries, StoredEntry
from torchrelay.checkpoint.storage.base import Cached, Memory, ReadHandle, Storage, open_for_reading
from torchrelay.checkpoint.storage.work import share
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.records import dataclass

WINDOW = 4 * BLOCK
"""Neighbouring small ranges are read together up to this size."""


class ReadRequest(NamedTuple):
    """Bytes [start, stop) of a stored entry, and their 1-D destination."""

    key: str
    start: int
    stop: int
    destination: memoryview


def pieces(request: ReadRequest, run: int) -> Iterator[ReadRequest]:
    """A long request in pieces that end at block borders, so that no block is read twice."""
    if request.stop - request.start <= run or len(request.destination) != request.stop - request.start:
        yield request
        return
    target, start = request.destination.cast("B"), request.start
    while start < request.stop:
        stop = min(request.stop, (start // run + 1) * run)
        piece = target[start - request.start : stop - request.start]
        yield ReadRequest(request.key, start, stop, piece)
        start = stop


def checked_target(entry: StoredEntry, request: ReadRequest) -> memoryview:
    """The destination as bytes; raises UsageError if entry, range and destination do not fit."""
    target = request.destination.cast("B")
    if not 0 <= request.start <= request.stop <= entry.nbytes or len(target) != request.stop - request.start:
        raise UsageError(
            f"bytes {request.start} to {request.stop} of {request.key}, which has {entry.nbytes},"
            f" do not fit into {len(target)} bytes"
        )
    return target


def neighbours(
    located: list[tuple[StoredEntry, ReadRequest]],
) -> Iterator[list[tuple[StoredEntry, ReadRequest]]]:
    """Runs of adjacent entries below one block; a larger one is a run by itself."""
    run: list[tuple[StoredEntry, ReadRequest]] = []
    for entry, request in located:
        joins = bool(run) and entry.nbytes <= BLOCK and run[-1][0].nbytes <= BLOCK
        beside = bool(run) and entry.start in (run[-1][0].stop, run[-1][0].start)
        if run and not (joins and beside and entry.stop - run[0][0].start <= WINDOW):
            yield run
            run = []
        run.append((entry, request))
    if run:
        yield run


VERIFY = ("full", "headers")
"""Levels of verification of a load: every block, or only the headers."""
WAITING = 2
"""Minimum of threads of a process that read from a device: one waits, one verifies."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of reads. Without `verify` blocks are not verified.

    All processes of a host read through the page cache and begin with the same bytes, so that shared ones
    come from the device once.
    """

    verify: bool = True
    threads: int = 4
    """Maximum of requests in flight to a storage."""
    of_the_cores: int = 4
    """This process's threads if the processes of a host share the cores: for local files."""

    def threads_for(self, handle: ReadHandle, begin: int, nbytes: int) -> int:
        """Number of parallel reads for these bytes of a file, from byte `begin` on."""
        if self.of_the_cores >= self.threads or not isinstance(handle, Cached):
            return self.threads
        if handle.is_at_hand(begin, nbytes):
            return self.of_the_cores
        return min(self.threads, max(WAITING, self.of_the_cores))


PLAIN = ReadOptions()


def verifies(level: str) -> bool:
    """Whether blocks are verified at a level; raises UsageError for an unknown one."""
    if level not in VERIFY:
        raise UsageError(f"invalid verify={level!r:.80}: expected one of {', '.join(map(repr, VERIFY))}")
    return level == "full"


T = TypeVar("T")
EACH = 4 << 20
"""Minimum bytes of work per thread: below, starting a thread costs more than it saves."""


def each(work: Callable[[T], None], items: Iterable[T], nbytes: int, threads: int) -> None:
    """Call `work` with every item by threads, begun in order; all have ended when this returns or raises."""

    def run(mine: Iterator[T]) -> None:
        for item in mine:
            work(item)

    most = min(threads, len(items)) if isinstance(items, Sized) else threads
    share(run, items, min(most, max(1, nbytes // EACH)), name="torchrelay-read")


Attempt = Callable[[Callable[[], None]], None]
"""Calls its argument, maybe again after a failure."""


@dataclass(frozen=True)
class Portion:
    """Bytes of a file, from byte `begin` on, that are read at once by `read`."""

    storage: Storage
    path: str
    begin: int
    nbytes: int
    read: Callable[[ReadHandle], None]


class _KeptOpen:
    """Keeps the last file open; for one thread at a time."""

    def __init__(self) -> None:
        self._what: tuple[Storage, str] | None = None
        self._handle: ReadHandle
        self._opened = ExitStack()

    def use(self, one: Portion, work: Callable[[ReadHandle], T]) -> T:
        """Call `work` with the file of a portion; after a failure a retry opens what has the name then."""
        try:
            if self._what != (one.storage, one.path):
                self.close()
                self._handle = self._opened.enter_context(open_for_reading(one.storage, one.path))
                self._what = one.storage, one.path
            return work(self._handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the open file, if any. An error here does not affect earlier reads."""
        self._what = None
        with suppress(OSError):
            self._opened.close()


def once(read: Callable[[], None]) -> None:
    """Call `read` without a retry."""
    read()


def read_portions(
    portions: Iterable[Portion], nbytes: int, options: ReadOptions, attempt: Attempt = once
) -> None:
    """Read all portions, of about `nbytes`, each by `attempt`; the first error ends it and is raised."""
    coming = iter(portions)
    first = next(coming, None)
    if first is None:
        return
    spare = [_KeptOpen()]
    threads = options.threads
    with suppress(OSError):  # the read itself reports the error
        threads = spare[0].use(first, lambda handle: options.threads_for(handle, first.begin, first.nbytes))

    def read(one: Portion) -> None:
        files = spare.pop() if spare else _KeptOpen()
        try:
            attempt(lambda: files.use(one, one.read))
        finally:
            spare.append(files)

    try:
        each(read, chain([first], coming), nbytes, threads)
    finally:
        for files in spare:
            files.close()


TOGETHER = 512
"""Entries that are read with one call; current systems allow 1,024."""
BYTES = 2 * BLOCK
"""Bytes that are read and then verified while they are in the processor's cache."""
REMOTE_BYTES = 8 * BLOCK
"""The same for storages with high latency."""


@dataclass(frozen=True)
class EntryBatch:
    """Entries of a file in its order, none empty, with their destinations, if any."""

    path: str
    entries: StoredEntries
    numbers: Sequence[int]
    memories: Sequence[Memory]

    @property
    def stored(self) -> StoredColumns:
        """The columns of the file."""
        return self.entries.stored

    @property
    def start(self) -> int:
        """Offset of the first entry in the file."""
        return self.stored.data_start + self.stored.starts[self.numbers[0]]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.stored.data_start + self.stored.stops[self.numbers[-1]] - self.start

    def read(self, scattered: Callable[[int, Sequence[Memory]], int], *, verify: bool) -> None:
        """Fill all memories; raises DamagedError naming file, key and block."""
        stored = self.stored
        gaps = [stored.starts[behind] - stored.stops[before] for before, behind in pairwise(self.numbers)]
        memories = self.memories
        if any(gaps):
            unwanted = memoryview(bytearray(max(gaps)))
            pairs = zip([0, *gaps], self.memories, strict=True)
            memories = [one for gap, memory in pairs for one in ([unwanted[:gap]] * (gap > 0) + [memory])]
        self._counted(lambda: scattered(self.start, memories))
        if verify:
            self._verify(digests_of(self.memories))

    def check(self, read_into: Callable[[int, memoryview], int], room: memoryview) -> None:
        """Verify entries in `room`, scratch memory of `nbytes` bytes; see `read`."""
        self._counted(lambda: read_into(self.start, room))
        starts, stops = self.stored.bounds(self.numbers)
        first = starts[0]
        self._verify(
            digests_of(room[start - first : stop - first] for start, stop in zip(starts, stops, strict=True))
        )

    def _counted(self, read: Callable[[], int]) -> None:
        try:
            count = read()
        except StorageError as error:
            raise type(error)(
                f"{error} (reading {self.entries.key_at(self.numbers[0])} and others)"
            ) from error
        if count != self.nbytes:
            end = self.start + count
            stops, beyond = self.stored.stops, end - self.stored.data_start
            key = self.entries.key_at(next(number for number in self.numbers if stops[number] > beyond))
            raise DamagedError(f"{self.path} ends inside of {key}, at byte {end}")

    def _verify(self, found: bytes) -> None:
        blocks, digests = self.stored.blocks, self.stored.digests
        first, last = self.numbers[0], self.numbers[-1]
        if last - first == len(self.numbers) - 1:
            expected = digests[blocks[first] * SIZE : blocks[last + 1] * SIZE]
        else:
            each = (digests[blocks[number] * SIZE : blocks[number + 1] * SIZE] for number in self.numbers)
            expected = b"".join(each)
        if found == expected:
            return
        for at, number in enumerate(self.numbers):
            if found[at * SIZE : (at + 1) * SIZE] != expected[at * SIZE : (at + 1) * SIZE]:
                offset = self.stored.data_start + self.stored.starts[number]
                raise DamagedError(
                    f"{self.path}: block 0 of {self.entries.key_at(number)}, at byte {offset} of the file,"
                    " is not what was saved"
                )


def in_order(numbers: Sequence[int], memories: Sequence[Memory]) -> tuple[Sequence[int], Sequence[Memory]]:
    """Entries in file order, each with its memory; a range if they are adjacent."""
    if isinstance(numbers, range):
        return numbers, memories
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    found = list(map(numbers.__getitem__, order))
    beside = range(found[0], found[0] + len(found)) if found else range(0)
    return (beside if found == list(beside) else found), list(map(memories.__getitem__, order))


def batches(
    path: str, entries: StoredEntries, numbers: Sequence[int], memories: Sequence[Memory] = (), gap: int = 0
) -> Iterator[EntryBatch]:
    """Entries, in file order and none of them empty or larger than a block, in batches.

    Those with up to `gap` bytes between them are read together; one that is wanted twice is read twice.
    Without memory they can only be verified.
    """
    starts, stops = entries.stored.bounds(numbers)
    most = REMOTE_BYTES if gap else BYTES
    for first in range(0, len(starts), TOGETHER):
        end = min(first + TOGETHER, len(starts))
        edges = [first]
        if starts[first + 1 : end] != stops[first : end - 1] or stops[end - 1] - starts[first] > BYTES:
            for at in range(first + 1, end):
                if not 0 <= starts[at] - stops[at - 1] <= gap or stops[at] - starts[edges[-1]] > most:
                    edges.append(at)
        for start, stop in pairwise([*edges, end]):
            yield EntryBatch(path, entries, numbers[start:stop], memories[start:stop])


Span = tuple[int, int]
"""The first wanted byte of an entry, and the one after the last."""


@dataclass(frozen=True)
class Passage:
    """How an entry is read: whole blocks, and up to `at_once` bytes at once across gaps of `gap` bytes."""

    size: int
    block: int
    at_once: int = 0
    gap: int = 0

    def begin(self, span: Span) -> int:
        """The begin of the block that a span begins in."""
        return span[0] // self.block * self.block

    def end(self, spans: Sequence[Span], number: int) -> int:
        """The end of the read for the span of this number."""
        begin, stop = self.begin(spans[number]), spans[number][1]
        for start, end in islice(spans, number + 1, None) if self.at_once else ():
            if start > stop + self.gap or end - begin > self.at_once:
                break
            stop = max(stop, end)
        return min(self.size, -(-stop // self.block) * self.block)


class Passing:
    """Sliding read buffer of one thread: the largest span and two blocks, or `at_once` and two."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def room(self, nbytes: int) -> memoryview:
        """Memory of so many bytes with undefined content; earlier content may be lost."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]

    def over(
        self, spans: Sequence[Span], passage: Passage, read: Callable[[int, memoryview], None]
    ) -> Iterator[memoryview]:
        """The bytes of each span, in order, valid until the next is requested; `read` fills memory."""
        first = end = 0  # the range of the entry in memory
        for number, span in enumerate(spans):
            if span[1] > end:
                begin, upto = passage.begin(span), passage.end(spans, number)
                kept = self._memory[begin - first : max(begin, end) - first]
                memory = self.room(upto - begin)
                memory[: len(kept)] = kept
                room = memory[len(kept) :]
                del kept  # it would keep memory that was too small
                read(upto - len(room), room)
                first, end = begin, upto
            yield self._memory[span[0] - first : span[1] - first]


class ThreadMemory(Passing, threading.local):
    """Scratch memory of each thread, reused for every portion."""
