"""Which bytes of a shard are read, in which portions, and by how many threads.

Opening a file looks at every part of its path, which takes as long as reading some hundred KiB.

Some wait for the device or copy from the kernel while another verifies; measured in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, suppress
from itertools import chain
from types import TracebackType
from typing import NamedTuple, TypeVar

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.shard.entries import StoredEntry
from torchrelay.checkpoint.storage.base import Cached, ReadHandle, Storage, open_for_reading
from torchrelay.checkpoint.storage.work import share
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

WINDOW = 4 * BLOCK
"""Neighbouring small ranges are read together up to this size."""


class ReadRequest(NamedTuple):
    """Bytes [start, stop) of a stored entry, and the 1-D bytes they go to."""

    key: str
    start: int
    stop: int
    destination: memoryview


def pieces(request: ReadRequest, run: int) -> Iterator[ReadRequest]:
    """A long request in pieces that end with a block, so that no block is read twice."""
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
    """The destination as bytes; raises UsageError where entry, range and destination do not fit."""
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
    """Runs of entries below one block that lie side by side; anything larger is a run of its own."""
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
"""Levels of verification of a load: every block, or only the headers that say what there is."""
WAITING = 2
"""So many threads of a process at least read what its device has to bring: one waits, one verifies."""


@dataclass(frozen=True)
class ReadOptions:
    """Without `verify` blocks are taken as they come.

    All processes of a host read through the page cache and begin with the same bytes, so that what
    several of them need comes from the device once and is put into place while the caches have it.
    """

    verify: bool = True
    threads: int = 4
    """So many requests to a storage are under way at a time."""
    of_the_cores: int = 4
    """This process's threads where those of all processes share the cores: files of this host."""

    def threads_for(self, handle: ReadHandle, begin: int, nbytes: int) -> int:
        """How many reads of these bytes of a file, from byte `begin` on, are to be under way at a time."""
        if self.of_the_cores >= self.threads or not isinstance(handle, Cached):
            return self.threads
        if handle.is_at_hand(begin, nbytes):
            return self.of_the_cores
        return min(self.threads, max(WAITING, self.of_the_cores))


PLAIN = ReadOptions()


def verifies(level: str) -> bool:
    """Whether blocks are verified at a level; raises UsageError for a word that is none."""
    if level not in VERIFY:
        raise UsageError(f"verify is {level!r:.80}; it is one of {', '.join(map(repr, VERIFY))}")
    return level == "full"


class KeptOpen:
    """Mutable; of one thread at a time."""

    def __init__(self) -> None:
        self._what: tuple[Storage, str] | None = None
        self._handle: ReadHandle
        self._opened = ExitStack()

    def reading(self, storage: Storage, path: str) -> KeptOpen:
        """For `with`, which gives the file for reads within the block; raises as `open_for_reading` does.

        Where the block fails it is closed: a second look is one at the file that has the name by then.
        """
        if self._what != (storage, path):
            self.close()
            self._handle = self._opened.enter_context(open_for_reading(storage, path))
            self._what = storage, path
        return self

    def __enter__(self) -> ReadHandle:
        return self._handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Close what is open; nothing, where nothing is. An error is none of what was read before."""
        self._what = None
        with suppress(OSError):
            self._opened.close()


T = TypeVar("T")
EACH = 4 << 20
"""Bytes of work for each thread: with less, one costs more to start than it saves."""


def each(work: Callable[[T], None], items: Iterable[T], nbytes: int, threads: int) -> None:
    """Call `work` with every item, begun in their order; the first error ends it and is raised.

    No thread is at work any more when this returns or raises: destinations are the caller's again.
    """

    def run(mine: Iterator[T]) -> None:
        for item in mine:
            work(item)

    most = min(threads, len(items)) if isinstance(items, Sized) else threads
    share(run, items, min(most, max(1, nbytes // EACH)), name="torchrelay-read")


Attempt = Callable[[Callable[[], None]], None]
"""Calls what it is given, perhaps once more where it failed."""


@dataclass(frozen=True)
class Portion:
    """Bytes of a file, from byte `begin` on, that are read at a time, and what reads them once it is open."""

    storage: Storage
    path: str
    begin: int
    nbytes: int
    read: Callable[[ReadHandle], None]


def once(read: Callable[[], None]) -> None:
    """An attempt without a second one."""
    read()


def read_portions(
    portions: Iterable[Portion], nbytes: int, options: ReadOptions, attempt: Attempt = once
) -> None:
    """Read all, begun in their order and each within an attempt; the first error ends it and is raised.

    `nbytes` is about how many bytes they are together. How many threads take part is decided by where the
    first of them lie; a process that asks late may find there what another one has just brought in. What
    comes lazily is made by whichever thread has time.
    """
    coming = iter(portions)
    first = next(coming, None)
    if first is None:
        return
    spare = [KeptOpen()]

    def read(one: Portion) -> None:
        files = spare.pop() if spare else KeptOpen()
        try:
            attempt(lambda: _read(one, files))
        finally:
            spare.append(files)

    try:
        each(read, chain([first], coming), nbytes, _threads(first, spare[0], options))
    finally:
        for files in spare:
            files.close()


def _read(one: Portion, files: KeptOpen) -> None:
    with files.reading(one.storage, one.path) as handle:
        one.read(handle)


def _threads(first: Portion, files: KeptOpen, options: ReadOptions) -> int:
    # What is wrong is said by whoever reads.
    with suppress(OSError), files.reading(first.storage, first.path) as handle:
        return options.threads_for(handle, first.begin, first.nbytes)
    return options.threads
