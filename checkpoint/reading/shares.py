"""Which host reads which bytes of leaves that all nodes need, so that each is read once; pure.

Drawn from the manifest alone, so that all processes that agree on the leaves draw the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.manifest.keys import parts_of
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import Flat, format_key
from torchrelay.jobs.cluster import NodePlace
from torchrelay.records import dataclass

PIECE = 16 * BLOCK
"""Bytes at most that travel at once."""
WORTH_IT = 8 << 20
"""With fewer bytes everybody reads for himself."""
Ranges = list[list[int]]


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a stored key in a file of `node`: those from byte `at` of leaf `row` on.

    It begins and ends with a block of the key.
    """

    row: int
    node: int
    key: str
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start


Batch = tuple[Part, ...]
"""What travels at once."""


@dataclass(frozen=True)
class Shares:
    """What each reader reads, a contiguous run of batches; readers are processes, one per host."""

    batches: dict[int, tuple[Batch, ...]]

    def in_turn(self) -> Iterator[tuple[int, Batch]]:
        """(reader, batch) in the order of the broadcasts: readers take turns, so that all read at a time."""
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
    """Rows as ranges [first, end), which are short to tell."""
    runs = groupby(enumerate(sorted(rows)), key=lambda pair: pair[1] - pair[0])
    found = [[row for _, row in run] for _, run in runs]
    return [[run[0], run[-1] + 1] for run in found]


def common_rows(told: Sequence[Ranges | None], manifest: Manifest) -> tuple[int, ...]:
    """The rows that all processes named; none where one named nothing, or where sharing does not pay."""
    # The same object for all who said the same: looked at once.
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


def _parts(manifest: Manifest, rows: Iterable[int]) -> Iterator[Part]:
    for row in rows:
        leaf = manifest.leaves[row]
        for node, key in parts_of(manifest.layouts[leaf.layout], row, leaf):
            first, end = (key.start, key.stop) if isinstance(key, Flat) else (0, leaf.elements)
            base, size = first * leaf.item_bytes, (end - first) * leaf.item_bytes
            text = format_key(key)
            for start in range(0, size, PIECE):
                yield Part(row, node, text, start, min(size, start + PIECE), base + start)


def _place(manifest: Manifest, part: Part) -> tuple[int, int, str, int, int]:
    leaf = manifest.leaves[part.row]
    return (leaf.source, part.node, leaf.group, part.row, part.start)


def _batches(parts: Iterable[Part]) -> Iterator[Batch]:
    """Neighbours travel together up to the size of a piece."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        if batch and size + part.nbytes > PIECE:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(part)
        size += part.nbytes
    if batch:
        yield tuple(batch)
