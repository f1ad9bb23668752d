"""How bytes are to be read: whether they are verified, and by how many threads."""

from __future__ import annotations

from torchrelay.checkpoint.storage.base import Fetches, ReadHandle
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

VERIFY = ("full", "headers")
"""Levels of verification of a load: every block, or only the headers that say what there is."""
WAITING = 2
"""So many threads of a process at least read what its device has to bring: one waits, one verifies."""


@dataclass(frozen=True)
class ReadOptions:
    """Without `verify` blocks are taken as they come.

    All processes of a host read through the page cache and begin with the same bytes, so that what
    several of them need comes from the device once and is put into place while the caches have it.
    """

    verify: bool = True
    threads: int = 4
    """So many requests to a storage are under way at a time."""
    of_the_cores: int = 4
    """This process's threads where those of all processes share the cores: files of this host."""

    def threads_for(self, handle: ReadHandle, begin: int, nbytes: int) -> int:
        """How many reads of these bytes of a file, from byte `begin` on, are to be under way at a time."""
        if self.of_the_cores >= self.threads or not isinstance(handle, Fetches):
            return self.threads
        if handle.is_at_hand(begin, nbytes):
            return self.of_the_cores
        return min(self.threads, max(WAITING, self.of_the_cores))


PLAIN = ReadOptions()


def verifies(level: str) -> bool:
    """Whether blocks are verified at a level; raises UsageError for a word that is none."""
    if level not in VERIFY:
        raise UsageError(f"verify is {level!r:.80}; it is one of {', '.join(map(repr, VERIFY))}")
    return level == "full"
