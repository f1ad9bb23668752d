"""Bytes that all hosts need, read by one of them each and sent to the others.

A reader is a process: it reads its share ahead, in a thread, straight into the destinations; batch by batch
all processes meet on the wire. What arrives is verified against the header's digests like bytes of a
disk; what is wrong is read from the storage instead, so a reader that failed is found out and nobody
has to be told. Whatever happens to a process, it takes part in all broadcasts, then raises.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import groupby

from torchrelay.checkpoint.format.shard.read_plan import ReadRequest
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.checkpoint.reading.shares import PIECE, Batch, Part, Shares
from torchrelay.errors import DamagedError
from torchrelay.jobs.session import Wire


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

        On an error destinations are undefined. Raises what `LeafReader.read_many` does, and PeerError
        when another process is lost.
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
        """What came over the wire is believed no more than what comes from a disk."""
        try:
            for part in batch:
                self._header(part).check(self._request(part))
        except DamagedError:
            self.read(batch)

    def _header(self, part: Part) -> ShardHeader:
        return self._reader.header(self._reader.manifest.leaves[part.row], part.node, part.key)

    def _request(self, part: Part) -> ReadRequest:
        return ReadRequest(part.key, part.start, part.stop, self._target(part))

    def _target(self, part: Part) -> memoryview:
        return self._memory[part.row][part.at : part.at + part.nbytes]


class _Ahead:
    """Reads batches in a thread, in order, while earlier ones are on their way to the others."""

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
        """Until the next batch was read, or will not be: then the others find that it is wrong."""
        self._done.acquire()

    def close(self) -> None:
        """Return when nothing is read any more."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
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
