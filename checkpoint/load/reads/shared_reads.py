"""Read bytes that all hosts need once: one host reads each share and broadcasts it.

Shares are computed from the manifest alone, so that all processes with the same leaves compute the same. A
reader is a process that reads its share in a thread, ahead of the broadcasts, straight into the destinations.
Received bytes are verified against the header's digests; wrong ones are read from the storage instead, so a
failed reader needs no message. A process that fails takes part in all broadcasts, then raises.

Shared are tensors that every node loads whole and that are the same for all. Each process reads all others
itself.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, zip_longest

from torchrelay.checkpoint.format.dtypes import BLOCK, memory_of
from torchrelay.checkpoint.format.manifest.schema import Manifest, ReplicatedLayout, Split, parts_of
from torchrelay.checkpoint.format.names import Flat, format_key
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import ReadOptions, ReadRequest
from torchrelay.checkpoint.load.lookup import find_row
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.state.tensor_memory import Read
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.runtime import Worker
from torchrelay.jobs.session import Session, Wire, together
from torchrelay.records import dataclass

PIECE = 16 * BLOCK
"""Maximum bytes of a broadcast."""
WORTH_IT = 8 << 20
"""With fewer bytes every process reads for itself."""
Ranges = list[list[int]]


@dataclass(frozen=True)
class ReadSlice:
    """Bytes [start, stop) of a stored key in a file of `node`: those from byte `at` of leaf `row` on.

    It begins and ends at a block border of the key.
    """

    row: int
    node: int
    key: str
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


Batch = tuple[ReadSlice, ...]
"""Slices that are broadcast together."""


Shares = Mapping[int, tuple[Batch, ...]]
"""Batches that each reader reads, contiguous; readers are processes, one per host."""


def in_turn(shares: Shares) -> Iterator[tuple[int, Batch]]:
    """(reader, batch) in the order of the broadcasts: readers alternate, so that all read in parallel."""
    for turn in zip_longest(*shares.values()):
        yield from ((reader, batch) for reader, batch in zip(shares, turn, strict=True) if batch)


def readers_of(nodes: Iterable[NodePlace]) -> tuple[int, ...]:
    """The lowest process of each host, in order."""
    lowest: dict[tuple[str, int], int] = {}
    for place in nodes:
        host = (place.host, place.host_index)
        lowest[host] = min(place.process, lowest.get(host, place.process))
    return tuple(sorted(lowest.values()))


def to_ranges(rows: Iterable[int]) -> Ranges:
    """Rows as ranges [first, end), for short messages."""
    runs = groupby(enumerate(sorted(rows)), key=lambda pair: pair[1] - pair[0])
    found = [[row for _, row in run] for _, run in runs]
    return [[run[0], run[-1] + 1] for run in found]


def common_rows(offers: Sequence[Ranges | None], manifest: Manifest) -> tuple[int, ...]:
    """The rows that all processes named; empty if one named none, or if sharing does not pay."""
    # one object for all equal answers, so it is parsed once
    distinct = list({id(ranges): ranges for ranges in offers}.values())
    if any(ranges is None for ranges in distinct):
        return ()
    sets = [{row for first, end in ranges or () for row in range(first, end)} for ranges in distinct]
    rows = tuple(sorted(set.intersection(*sets))) if sets else ()
    return rows if sum(manifest.leaves[row].nbytes for row in rows) >= WORTH_IT else ()


def shares(manifest: Manifest, rows: Iterable[int], readers: Sequence[int]) -> Shares:
    """Divide the bytes of rows between readers, in the order of the files."""

    def place(part: ReadSlice) -> tuple[int, int, str, int, int]:
        """The position in the files."""
        leaf = manifest.leaves[part.row]
        return (leaf.source, part.node, leaf.group, part.row, part.start)

    batches = list(_batches(sorted(_parts(manifest, rows), key=place)))
    total = sum(part.nbytes for batch in batches for part in batch)
    found: dict[int, list[Batch]] = {reader: [] for reader in readers}
    passed = 0
    for batch in batches:
        size = sum(part.nbytes for part in batch)
        found[readers[(2 * passed + size) * len(readers) // (2 * total)]].append(batch)
        passed += size
    return {reader: tuple(mine) for reader, mine in found.items()}


def _parts(manifest: Manifest, rows: Iterable[int]) -> Iterator[ReadSlice]:
    for row in rows:
        leaf = manifest.leaves[row]
        for node, key in parts_of(manifest.layouts[leaf.layout], row, leaf):
            first, end = (key.start, key.stop) if isinstance(key, Flat) else (0, leaf.elements)
            base, size = first * leaf.item_bytes, (end - first) * leaf.item_bytes
            text = format_key(key)
            for start in range(0, size, PIECE):
                yield ReadSlice(row, node, text, start, min(size, start + PIECE), base + start)


def _batches(parts: Iterable[ReadSlice]) -> Iterator[Batch]:
    """Neighbouring slices together, up to the size of a broadcast."""
    batch: list[ReadSlice] = []
    size = 0
    for part in parts:
        if batch and size + part.nbytes > PIECE:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(part)
        size += part.nbytes
    if batch:
        yield tuple(batch)


class SharedReads:
    """The shared reads of one load in this process; `memory` has the destination of each leaf by row."""

    def __init__(
        self, reader: LeafReader, wire: Wire, shares: Shares, memory: Mapping[int, memoryview]
    ) -> None:
        self._reader = reader
        self._wire = wire
        self._shares = shares
        self._memory = memory
        self._staging = memoryview(bytearray(PIECE))  # now: nothing may fail between two broadcasts
        self._failed: Exception | None = None
        self._failed_read: BaseException | None = None

    def run(self) -> None:
        """Fill all destinations, verified; all processes call this at the same time.

        After an error destinations are undefined. Raises as `LeafReader.read_many` does, and PeerError when
        another process is lost.
        """
        worker, ended = Worker("torchrelay-read-ahead"), threading.Event()

        def read_ahead(batch: Batch) -> None:
            try:
                if self._failed_read is None and not ended.is_set():
                    self.read(batch)
            except BaseException as error:  # the receivers find the bytes wrong
                self._failed_read = error

        mine = [partial(read_ahead, batch) for batch in self._shares.get(self._wire.rank, ())]
        ahead = [(read, worker.submit(read)) for read in mine]
        following = iter(ahead)
        try:
            for reader, batch in in_turn(self._shares):
                if reader == self._wire.rank:
                    read, item = next(following)
                    worker.wait(item) if item is not None else read()  # without a thread it is read now
                self._broadcast(reader, batch)
        finally:
            ended.set()
            for _, item in ahead:
                if item is not None:
                    worker.wait(item)
            worker.stop()
        failed = self._failed_read or self._failed
        if failed is not None:
            raise failed

    def read(self, batch: Batch) -> None:
        """Read a batch from the storage, verified."""
        requests = [(self._header(part), self._request(part)) for part in batch]
        for _, some in groupby(requests, key=lambda pair: pair[0].path):
            found = list(some)
            self._reader.read_stored(found[0][0], [request for _, request in found])

    def _broadcast(self, reader: int, batch: Batch) -> None:
        mine = reader == self._wire.rank
        if len(batch) == 1:
            self._wire.broadcast(self._target(batch[0]), reader)
        else:
            staged, at = [], 0
            for part in batch:
                staged.append((self._target(part), self._staging[at : at + part.nbytes]))
                at += part.nbytes
            for target, stage in staged if mine else ():
                stage[:] = target
            self._wire.broadcast(self._staging[:at], reader)
            for target, stage in () if mine else staged:
                target[:] = stage
        if not mine and self._failed is None:
            try:
                self._verify(batch)
            except Exception as error:
                self._failed = error

    def _verify(self, batch: Batch) -> None:
        """Verify received bytes, as those of a disk; wrong ones are read from the storage."""
        try:
            for part in batch:
                self._header(part).check(self._request(part))
        except DamagedError:
            self.read(batch)

    def _header(self, part: ReadSlice) -> ShardHeader:
        return self._reader.header(self._reader.manifest.leaves[part.row], part.node, part.key)

    def _request(self, part: ReadSlice) -> ReadRequest:
        return ReadRequest(part.key, part.start, part.stop, self._target(part))

    def _target(self, part: ReadSlice) -> memoryview:
        return self._memory[part.row][part.at : part.at + part.nbytes]


def options_of(session: Session) -> ReadOptions:
    """Read options in which the processes of a session on this host share its cores."""
    mine = session.local_nodes[0]
    processes = {place.process for place in session.nodes if place.host == mine.host}
    known = hasattr(os, "sched_getaffinity")  # else the cores of the host have to do it
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return ReadOptions(of_the_cores=threads_each(len(processes), cores))


def threads_each(processes: int, cores: int) -> int:
    """Threads of each process for work in memory: two per core, shared by all processes of the host."""
    return max(1, min(ReadOptions.threads, 2 * cores // processes))


def shareable(manifest: Manifest, reads: Sequence[Read], node: str | None) -> dict[int, Read]:
    """The reads of a node that other hosts may do as well, by row."""
    rows = [(find_row(manifest, read.leaf, node), read) for read in reads if read.target is None]
    count = Counter(row for row, _ in rows)
    leaves = {row: manifest.leaves[row] for row in count}  # those that are tensors which all nodes share
    shared = {
        row
        for row, leaf in leaves.items()
        if leaf.kind == "tensor"
        and leaf.nbytes > 0
        and isinstance(manifest.layouts[leaf.layout], (ReplicatedLayout, Split))
    }
    return {row: read for row, read in rows if count[row] == 1 and row in shared}


def offer(session: Session, rows: Mapping[int, Read]) -> Ranges | None:
    """The rows that this process offers to share; None without any."""
    alone = len(session.local_nodes) > 1 or len(readers_of(session.nodes)) == 1
    return None if alone else to_ranges(rows)


def agreed(
    session: Session, reader: LeafReader, rows: Mapping[int, Read], offers: Sequence[Ranges | None]
) -> tuple[SharedReads, frozenset[str]] | None:
    """The shared reads, ready to run, and the leaves that they fill; None if nothing is shared.

    All processes call this with the same offers. Memory and connections are made here, so that a process that
    lacks them raises before any other waits for its bytes.
    """
    common = common_rows(offers, reader.manifest)
    if not common:
        return None
    ready: list[SharedReads] = []

    def prepare() -> None:
        wire = session.wire()
        if wire is None:
            raise UsageError("this session has no connections for share_reads: load without")
        drawn = shares(reader.manifest, common, readers_of(session.nodes))
        memory = {row: memory_of(rows[row].memory()) for row in common}
        for row, one in memory.items():
            if len(one) != (leaf := reader.manifest.leaves[row]).nbytes:
                raise UsageError(f"{leaf.name!r} ({leaf.nbytes} bytes) cannot fill {len(one)} bytes")
        ready.append(SharedReads(reader, wire, drawn, memory))

    together(session.peers, "load: shares", prepare)
    return ready[0], frozenset(rows[row].leaf for row in common)
