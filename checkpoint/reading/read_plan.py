"""What it takes to read some leaves: runs of bytes straight into memory, and boxes through slabs.

The same plan verifies the blocks that it would read, and keeps nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from torchrelay.checkpoint.format.layouts import Target
from torchrelay.checkpoint.format.shard.batched_reads import ThreadMemory
from torchrelay.checkpoint.format.shard.read_plan import Portion, ReadOptions, ReadRequest, read_portions
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.reading.box_reader import BoxPlan
from torchrelay.checkpoint.reading.seen_twice import seen_twice
from torchrelay.records import dataclass

NOWHERE = memoryview(b"")


@dataclass(frozen=True)
class LeafRead:
    """All bytes of a leaf, as `node` has it, into 1-D memory of exactly that size.

    With a `target` the memory is that of a tensor which holds only some boxes of the leaf. What goes to
    NOWHERE can only be verified.
    """

    leaf: str
    destination: memoryview
    node: str | None = None
    target: Target | None = None


class ReadPlan:
    """Reads of some files, planned: `straight` ones go right into their destinations."""

    def __init__(self, straight: Iterable[tuple[ShardHeader, ReadRequest]], boxes: BoxPlan) -> None:
        self._boxes = boxes
        self._straight: dict[str, tuple[ShardHeader, list[ReadRequest]]] = {}
        for header, request in [*straight, *boxes.straight]:
            self._straight.setdefault(header.path, (header, []))[1].append(request)

    def read(self, options: ReadOptions) -> None:
        """Fill all destinations, verified, in the order of the files.

        A mismatch is read again before it is believed. On an error destinations are undefined. Raises
        DamagedError and StorageError for what the storage has.
        """
        slabs = self._boxes.portions(options)
        nbytes = sum(one.stop - one.start for _, requests in self._straight.values() for one in requests)
        nbytes += sum(one.nbytes for some in slabs.values() for one in some)
        read_portions(self._portions(slabs, options), nbytes, options, seen_twice)

    def check(self, options: ReadOptions) -> int:
        """Verify all blocks that `read` reads, where they lie; the number of bytes. Raises as that does."""
        wanted = {path: (header, list(requests)) for path, (header, requests) in self._straight.items()}
        for header, request in self._boxes.wanted():
            wanted.setdefault(header.path, (header, []))[1].append(request)
        memory = ThreadMemory()
        return check_portions(
            [one for header, requests in wanted.values() for one in header.checks(requests, memory)], options
        )

    def _portions(self, slabs: dict[str, list[Portion]], options: ReadOptions) -> Iterator[Portion]:
        """What is read at a time, in the order of the files; straight reads are made file by file."""
        for path in sorted(self._straight.keys() | slabs.keys()):
            found = [*slabs.get(path, ())]
            if path in self._straight:
                header, requests = self._straight[path]
                found += header.portions(requests, options)
            yield from sorted(found, key=attrgetter("begin"))


def check_portions(portions: Sequence[Portion], options: ReadOptions) -> int:
    """Look at all of them in the order of the files; the number of bytes. Raises as they do."""
    nbytes = sum(one.nbytes for one in portions)
    read_portions(sorted(portions, key=attrgetter("path", "begin")), nbytes, options, seen_twice)
    return nbytes
