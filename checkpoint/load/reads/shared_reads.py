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
from itertools import groupby, zip_longest

from torchrelay.checkpoint.format.dtypes import BLOCK, memory_of
from torchrelay.checkpoint.format.manifest.schema import Manifest, ReplicatedLayout, Split, parts_of
from torchrelay.checkpoint.format.names import Flat, format_key
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import ReadOptions, ReadRequest
from torchrelay.checkpoint.load.lookup import find_row
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.state.reads import Read
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.cluster import NodePlace
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


@dataclass(frozen=True)
class Shares:
    """Batches that each reader reads, contiguous; readers are processes, one per host."""

    batches: dict[int, tuple[Batch, ...]]

    def in_turn(self) -> Iterator[tuple[int, Batch]]:
        """(reader, batch) in the order of the broadcasts: readers alternate, so that all read in parallel."""
        for turn in zip_longest(*self.batches.values()):
            yield from ((reader, batch) for reader, batch in zip(self.batches, turn, strict=True) if batch)


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


def common_rows(told: Sequence[Ranges | None], manifest: Manifest) -> tuple[int, ...]:
    """The rows that all processes named; empty if one named none, or if sharing does not pay."""
    # one object for all equal answers, so it is parsed once
    distinct = list({id(ranges): ranges for ranges in told}.values())
    if any(ranges is None for ranges in distinct):
        return ()
    sets = [{row for first, end in ranges or () for row in range(first, end)} for ranges in distinct]
    rows = tuple(sorted(set.intersection(*sets))) if sets else ()
    return rows if sum(manifest.leaves[row].nbytes for row in rows) >= WORTH_IT else ()


def shares(manifest: Manifest, rows: Iterable[int], readers: Sequence[int]) -> Shares:
    """Divide the bytes of rows between readers, in the order of the files."""
    batches = list(_batches(sorted(_parts(manifest, rows), key=lambda part: _place(manifest, part))))
    total = sum(part.nbytes for batch in batches for part in batch)
    found: dict[int, list[Batch]] = {reader: [] for reader in readers}
    passed = 0
    for batch in batches:
        size = sum(part.nbytes for part in batch)
        found[readers[(2 * passed + size) * len(readers) // (2 * total)]].append(batch)
        passed += size
    return Shares({reader: tuple(mine) for reader, mine in found.items()})


def _parts(manifest: Manifest, rows: Iterable[int]) -> Iterator[ReadSlice]:
    for row in rows:
        leaf = manifest.leaves[row]
        for node, key in parts_of(manifest.layouts[leaf.layout], row, leaf):
            first, end = (key.start, key.stop) if isinstance(key, Flat) else (0, leaf.elements)
            base, size = first * leaf.item_bytes, (end - first) * leaf.item_bytes
            text = format_key(key)
            for start in range(0, size, PIECE):
                yield ReadSlice(row, node, text, start, min(size, start + PIECE), base + start)


def _place(manifest: Manifest, part: ReadSlice) -> tuple[int, int, str, int, int]:
    """Sort key: the position of a slice in the files."""
    leaf = manifest.leaves[part.row]
    return (leaf.source, part.node, leaf.group, part.row, part.start)


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

    def run(self) -> None:
        """Fill all destinations, verified; all processes call this at the same time.

        After an error destinations are undefined. Raises as `LeafReader.read_many` does, and PeerError when
        another process is lost.
        """
        ahead = _Ahead(self, self._shares.batches.get(self._wire.rank, ()))
        try:
            for reader, batch in self._shares.in_turn():
                if reader == self._wire.rank:
                    ahead.wait()
                self._broadcast(reader, batch)
        finally:
            ahead.close()
        failed = ahead.failed or self._failed
        if failed is not None:
            raise failed

    def read(self, batch: Batch) -> None:
        """Read a batch from the storage, verified."""
        requests = [(self._header(part), self._request(part)) for part in batch]
        for _, some in groupby(requests, key=lambda pair: pair[0].path):
            found = list(some)
            self._reader.read_stored(found[0][0], [request for _, request in found])

    def _broadcast(self, reader: int, batch: Batch) -> None:
        """Broadcast a batch from or to the destinations."""
        mine = reader == self._wire.rank
        if len(batch) == 1:
            self._wire.broadcast(self._target(batch[0]), reader)
        else:
            self._broadcast_staged(reader, batch, mine=mine)
        if not mine and self._failed is None:
            try:
                self._verify(batch)
            except Exception as error:
                self._failed = error

    def _broadcast_staged(self, reader: int, batch: Batch, *, mine: bool) -> None:
        """Broadcast a batch through a buffer."""
        staged, at = [], 0
        for part in batch:
            staged.append((self._target(part), self._staging[at : at + part.nbytes]))
            at += part.nbytes
        for target, stage in staged if mine else ():
            stage[:] = target
        self._wire.broadcast(self._staging[:at], reader)
        for target, stage in () if mine else staged:
            target[:] = stage

    def _verify(self, batch: Batch) -> None:
        """Verify received bytes, as those of a disk; wrong ones are read from the storage."""
        try:
            for part in batch:
                self._header(part).check(self._request(part))
        except DamagedError:
            self.read(batch)

    def _header(self, part: ReadSlice) -> ShardHeader:
        """The header of the file of a slice."""
        return self._reader.header(self._reader.manifest.leaves[part.row], part.node, part.key)

    def _request(self, part: ReadSlice) -> ReadRequest:
        """The read of a slice into its destination."""
        return ReadRequest(part.key, part.start, part.stop, self._target(part))

    def _target(self, part: ReadSlice) -> memoryview:
        """The destination of a slice."""
        return self._memory[part.row][part.at : part.at + part.nbytes]


class _Ahead:
    """Reads batches in a thread, in order, while earlier ones are sent to the others."""

    def __init__(self, reads: SharedReads, batches: tuple[Batch, ...]) -> None:
        self.failed: BaseException | None = None
        self._reads = reads
        self._batches = batches
        self._done = threading.Semaphore(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torchrelay-read-ahead", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads in this process
            self._run()

    def wait(self) -> None:
        """Wait until the next batch is read or has failed: then the receivers find it wrong."""
        self._done.acquire()

    def close(self) -> None:
        """Stop the thread and wait for its last read."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Read all batches, in order."""
        try:
            for batch in self._batches:
                if self._stopped:
                    return
                self._reads.read(batch)
                self._done.release()
        except BaseException as error:
            self.failed = error
        finally:
            if self._batches:
                self._done.release(len(self._batches))


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
    return {row: read for row, read in rows if count[row] == 1 and _one_for_all(manifest, row)}


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
        memory = {row: _memory(reader.manifest, row, rows[row]) for row in common}
        ready.append(SharedReads(reader, wire, drawn, memory))

    together(session.peers, "load: shares", prepare)
    return ready[0], frozenset(rows[row].leaf for row in common)


def _one_for_all(manifest: Manifest, row: int) -> bool:
    """Whether a leaf is a tensor that all its nodes share."""
    leaf = manifest.leaves[row]
    layout = manifest.layouts[leaf.layout]
    return leaf.kind == "tensor" and leaf.nbytes > 0 and isinstance(layout, (ReplicatedLayout, Split))


def _memory(manifest: Manifest, row: int, read: Read) -> memoryview:
    """The destination of a shared leaf as bytes."""
    leaf, memory = manifest.leaves[row], memory_of(read.memory())
    if len(memory) != leaf.nbytes:
        raise UsageError(f"{leaf.name!r} ({leaf.nbytes} bytes) cannot fill {len(memory)} bytes")
    return memory
