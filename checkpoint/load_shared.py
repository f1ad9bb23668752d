"""Which of a load's reads the hosts share, found in every process and agreed on by all.

Shared are tensors that every node takes whole and that are one for all of them. What differs between
nodes, boxes of sharded tensors, and what some nodes do not have, every process reads for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.layouts import Replicated, Split
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.checkpoint.reading.lookup import find_row
from torchrelay.checkpoint.reading.shared_reads import SharedReads
from torchrelay.checkpoint.reading.shares import Ranges, common_rows, readers_of, shares, to_ranges
from torchrelay.checkpoint.state.reads import Read
from torchrelay.errors import UsageError
from torchrelay.jobs.session import Session, together


def shareable(manifest: Manifest, reads: Sequence[Read], node: str | None) -> dict[int, Read]:
    """The reads of a node that others may do as well, by row."""
    rows = [(find_row(manifest, read.leaf, node), read) for read in reads if read.target is None]
    count = Counter(row for row, _ in rows)
    return {row: read for row, read in rows if count[row] == 1 and _one_for_all(manifest, row)}


def offer(session: Session, rows: Mapping[int, Read]) -> Ranges | None:
    """What this process tells the others; None where nothing can be shared."""
    alone = len(session.local_nodes) > 1 or len(readers_of(session.nodes)) == 1
    return None if alone else to_ranges(rows)


def agreed(
    session: Session, reader: LeafReader, rows: Mapping[int, Read], offers: Sequence[Ranges | None]
) -> tuple[SharedReads, frozenset[str]] | None:
    """The shared reads, ready to run, and the leaves that they fill; None where nothing is shared.

    All processes call this with the same offers. Memory and connections are made here, so that a
    process that lacks them says so before any other waits for its bytes.
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
    leaf = manifest.leaves[row]
    layout = manifest.layouts[leaf.layout]
    return leaf.kind == "tensor" and leaf.nbytes > 0 and isinstance(layout, (Replicated, Split))


def _memory(manifest: Manifest, row: int, read: Read) -> memoryview:
    leaf, memory = manifest.leaves[row], memory_of(read.memory())
    if len(memory) != leaf.nbytes:
        raise UsageError(f"{leaf.name!r} ({leaf.nbytes} bytes) cannot fill {len(memory)} bytes")
    return memory
