"""Memory through which spans of an entry pass in the order of the file, in whole blocks, each read once.

What is read, verified and put into place at a time stays in the processor's cache; measured in
docs/performance.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from torchrelay.records import dataclass

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
