"""Reads of very many small entries at a time, straight into where they belong.

What costs time with very many small tensors is not their bytes but what is done for each of them; so
nothing here is done entry by entry unless something is wrong.

What is read, verified and put into place at a time stays in the processor's cache; measured in
docs/performance.md.

One built-in function puts a question to all. Give at most `AT_ONCE` at a time: so many stay in the
processor's cache until the last question; a tensor that does not takes four times as long for each.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, digests_of, has_memory
from torchrelay.checkpoint.format.shard.entries import Stored, StoredEntries
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch


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


Span = tuple[int, int]
"""The first byte of an entry that is wanted, and the one after the last."""


@dataclass(frozen=True)
class Passage:
    """How an entry of `size` bytes is read: whole blocks of `block` bytes, and how far beyond a span.

    Later spans are read along with one, up to `far` bytes at a time, where no gap is wider than `gap`.
    """

    size: int
    block: int
    far: int = 0
    gap: int = 0

    def begin(self, span: Span) -> int:
        """Where the block begins that a span begins in."""
        return span[0] // self.block * self.block

    def end(self, spans: Sequence[Span], number: int) -> int:
        """Up to where to read for the span of this number."""
        begin, stop = self.begin(spans[number]), spans[number][1]
        for start, end in islice(spans, number + 1, None) if self.far else ():
            if start > stop + self.gap or end - begin > self.far:
                break
            stop = max(stop, end)
        return min(self.size, -(-stop // self.block) * self.block)


class Passing:
    """Mutable; of one thread at a time. Its memory: the largest span and two blocks, or `far` and two."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def room(self, nbytes: int) -> memoryview:
        """So many bytes; what they hold means nothing, and earlier ones may be no longer there."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]

    def over(
        self, spans: Sequence[Span], passage: Passage, read: Callable[[int, memoryview], None]
    ) -> Iterator[memoryview]:
        """The bytes of each span, until the next one is asked for; `read` fills memory from a byte on.

        Spans come in the order of their first bytes, and lie inside of the entry.
        """
        first = end = 0  # what of the entry the memory holds
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


class ThreadMemory:
    """Memory of each thread for what it looks at and forgets, used again for every portion."""

    def __init__(self) -> None:
        self._own = threading.local()

    def room(self, nbytes: int) -> memoryview:
        """So many bytes of the calling thread's memory; what they hold means nothing."""
        if not hasattr(self._own, "passing"):
            self._own.passing = Passing()
        passing: Passing = self._own.passing
        return passing.room(nbytes)


AT_ONCE = 1024


def all_dense(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are tensors of no subclass, dense, with content, none of them quantised."""
    return (
        all_strided(found)
        and not any(map(attrgetter("is_quantized"), found))
        and not any(map(attrgetter("is_meta"), found))
    )


def all_strided(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are tensors of no subclass and of the usual layout, with content or without."""
    import torch

    return (
        set(map(type, found)) <= {torch.Tensor, torch.nn.Parameter}
        and not any(map(attrgetter("is_nested"), found))  # a nested one cannot be asked the rest
        and set(map(attrgetter("layout"), found)) <= {torch.strided}
    )


def all_in_order(dense: Sequence[torch.Tensor], some_complex: bool = True) -> bool:
    """Whether each lies in order in the memory of the CPU, as what its elements are."""
    import torch

    return (
        all(map(attrgetter("is_cpu"), dense))
        and all(map(torch.Tensor.is_contiguous, dense))
        and not (some_complex and any(map(torch.Tensor.is_conj, dense)))
        and not any(map(torch.Tensor.is_neg, dense))
    )


def all_in_memory(strided: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of each, where it has any, lie somewhere."""
    import torch

    try:
        if all(map(torch.Tensor.data_ptr, strided)):
            return True
    except RuntimeError:
        return False
    return all(map(has_memory, strided))


def memories_of(in_order: Sequence[torch.Tensor]) -> list[Memory]:
    """The bytes of each, to be read and written as long as the tensors are there."""
    import torch

    sizes = list(map(attrgetter("nbytes"), in_order))
    return memories_at(list(map(torch.Tensor.data_ptr, in_order)), sizes)


def memories_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
    """Memory that somebody else keeps."""
    kinds = {size: ctypes.c_ubyte * size for size in set(sizes)}
    return [kinds[size].from_address(address) for address, size in zip(addresses, sizes, strict=True)]
