"""What is asked of a shard: bytes of entries and where they go, cut and grouped as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchrelay.checkpoint.disk.digest import BLOCK
from torchrelay.checkpoint.disk.stored_entries import StoredEntry
from torchrelay.errors import UsageError

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
