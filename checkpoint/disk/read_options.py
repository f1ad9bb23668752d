"""How bytes are to be read: whether they are verified, and who else on this host reads the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchrelay.checkpoint.storage import Fetches, ReadHandle
from torchrelay.errors import UsageError

T = TypeVar("T")
VERIFY = ("full", "headers")
"""Levels of verification of a load: every block, or only the headers that say what there is."""


@dataclass(frozen=True)
class ReadOptions:
    """Without `verify` blocks are taken as they come.

    This process is number `number` of `processes` on this host that load at the same time. All read
    through the page cache, so that what several of them need comes from the device once.
    """

    verify: bool = True
    number: int = 0
    processes: int = 1
    threads: int = 4
    """So many reads are under way at a time: while one thread verifies, the device has something to do."""
    threads_at_hand: int = 4
    """At most so many for bytes in the page cache: where all cores are busy, more only take turns."""

    def turned(self, items: Sequence[T]) -> list[T]:
        """The items from this process's place on and then those before it.

        Processes that begin at different places of a file fill the page cache for each other.
        """
        at = len(items) * (self.number % self.processes) // self.processes
        return [*items[at:], *items[:at]]

    def threads_for(self, handle: ReadHandle, begin: int, nbytes: int) -> int:
        """How many reads of these bytes of a file, from byte `begin` on, are to be under way at a time."""
        if self.threads_at_hand >= self.threads:
            return self.threads
        at_hand = isinstance(handle, Fetches) and handle.is_at_hand(begin, nbytes)
        return self.threads_at_hand if at_hand else self.threads


PLAIN = ReadOptions()


def verifies(level: str) -> bool:
    """Whether blocks are verified at a level; raises UsageError for a word that is none."""
    if level not in VERIFY:
        raise UsageError(f"verify is {level!r:.80}; it is one of {', '.join(map(repr, VERIFY))}")
    return level == "full"
