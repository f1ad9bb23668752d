"""Whole entries of a block at most, by the hundreds: read with one call, straight into where they belong.

What costs time with very many small tensors is not their bytes but what is done for each of them; so
nothing here is done entry by entry unless something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from torchrelay.checkpoint.disk.digest import BLOCK, SIZE, digests_of
from torchrelay.checkpoint.disk.stored_entries import Stored, StoredEntries
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass

TOGETHER = 512
"""Entries that are read with one call; the systems that there are take 1,024."""
BYTES = 2 * BLOCK
"""Bytes that are read and then verified while the processor's cache still has them."""
FAR_BYTES = 8 * BLOCK
"""The same where requests are what costs."""


@dataclass(frozen=True)
class Batch:
    """Entries of a file in its order, none empty, with the memory of each, if they are to have any.

    What lies between them, where they do not lie side by side, is read and forgotten.
    """

    path: str
    entries: StoredEntries
    numbers: Sequence[int]
    memories: Sequence[Memory]

    @property
    def stored(self) -> Stored:
        """The columns of the file."""
        return self.entries.stored

    @property
    def start(self) -> int:
        """Where in the file the first entry begins."""
        return self.stored.data_start + self.stored.columns.starts[self.numbers[0]]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.stored.data_start + self.stored.columns.stops[self.numbers[-1]] - self.start

    def read(self, scattered: Callable[[int, Sequence[Memory]], int], *, verify: bool) -> None:
        """Fill all memories; raises DamagedError naming file, key and block."""
        memories = self._with_gaps()
        self._counted(lambda: scattered(self.start, memories))
        if verify:
            self._verify(digests_of(self.memories))

    def check(self, read_into: Callable[[int, memoryview], int], room: memoryview) -> None:
        """Verify entries in `room`, memory of `nbytes` that holds nothing of them afterwards; see `read`."""
        self._counted(lambda: read_into(self.start, room))
        starts, stops = self.stored.columns.bounds(self.numbers)
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
            key = self.entries.key_at(self._at(self.start + count))
            raise DamagedError(f"{self.path} ends inside of {key}, at byte {self.start + count}")

    def _with_gaps(self) -> Sequence[Memory]:
        columns = self.stored.columns
        gaps = [columns.starts[behind] - columns.stops[before] for before, behind in pairwise(self.numbers)]
        if not any(gaps):
            return self.memories
        unwanted = memoryview(bytearray(max(gaps)))
        found = [self.memories[0]]
        for gap, memory in zip(gaps, self.memories[1:], strict=True):
            found += [unwanted[:gap], memory] if gap else [memory]
        return found

    def _verify(self, found: bytes) -> None:
        expected = self._expected()
        if found == expected:
            return
        for at, number in enumerate(self.numbers):
            if found[at * SIZE : (at + 1) * SIZE] != expected[at * SIZE : (at + 1) * SIZE]:
                offset = self.stored.data_start + self.stored.columns.starts[number]
                raise DamagedError(
                    f"{self.path}: block 0 of {self.entries.key_at(number)}, at byte {offset} of the file,"
                    " is not what was saved"
                )

    def _expected(self) -> bytes:
        blocks, digests = self.stored.columns.blocks, self.stored.digests
        first, last = self.numbers[0], self.numbers[-1]
        if last - first == len(self.numbers) - 1:
            return digests[blocks[first] * SIZE : blocks[last + 1] * SIZE]
        return b"".join(digests[blocks[number] * SIZE : blocks[number + 1] * SIZE] for number in self.numbers)

    def _at(self, offset: int) -> int:
        """The number of the entry that an offset of the file lies in."""
        stops = self.stored.columns.stops
        beyond = offset - self.stored.data_start
        return next(number for number in self.numbers if stops[number] > beyond)


def in_order(numbers: Sequence[int], memories: Sequence[Memory]) -> tuple[Sequence[int], Sequence[Memory]]:
    """Entries in the order of the file, each with its memory; a range where they lie side by side."""
    if isinstance(numbers, range):
        return numbers, memories
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    found = list(map(numbers.__getitem__, order))
    beside = range(found[0], found[0] + len(found)) if found else range(0)
    return (beside if found == list(beside) else found), list(map(memories.__getitem__, order))


def batches(
    path: str,
    entries: StoredEntries,
    numbers: Sequence[int],
    memories: Sequence[Memory] = (),
    gap: int = 0,
) -> Iterator[Batch]:
    """Entries, in the order of the file and none of them empty or above a block, in batches.

    Those with up to `gap` bytes between them are read together; one that is wanted twice is read twice.
    Without memory of their own they can only be checked.
    """
    starts, stops = entries.stored.columns.bounds(numbers)
    for at, end in _runs(starts, stops, gap):
        yield Batch(path, entries, numbers[at:end], memories[at:end])


def _runs(starts: Sequence[int], stops: Sequence[int], gap: int) -> Iterator[tuple[int, int]]:
    """Places from where to where entries are read together, of bounded number and bytes."""
    for at in range(0, len(starts), TOGETHER):
        end = min(at + TOGETHER, len(starts))
        if starts[at + 1 : end] == stops[at : end - 1] and stops[end - 1] - starts[at] <= BYTES:
            yield at, end
        else:
            yield from _divided(starts, stops, (at, end), gap)


def _divided(
    starts: Sequence[int], stops: Sequence[int], places: tuple[int, int], gap: int
) -> Iterator[tuple[int, int]]:
    first, end = places
    most = FAR_BYTES if gap else BYTES
    for at in range(first + 1, end):
        if not 0 <= starts[at] - stops[at - 1] <= gap or stops[at] - starts[first] > most:
            yield first, at
            first = at
    yield first, end
