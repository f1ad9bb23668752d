"""Reads of one file after the other that a few threads share, so that none waits where a file ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain

from torchrelay.checkpoint.disk.kept_open import KeptOpen
from torchrelay.checkpoint.disk.read_options import ReadOptions
from torchrelay.checkpoint.disk.side_by_side import each
from torchrelay.checkpoint.storage.base import ReadHandle, Storage
from torchrelay.records import dataclass

Attempt = Callable[[Callable[[], None]], None]
"""Calls what it is given, perhaps once more where it failed."""


@dataclass(frozen=True)
class Portion:
    """Bytes of a file, from byte `begin` on, that are read at a time, and what reads them once it is open."""

    storage: Storage
    path: str
    begin: int
    nbytes: int
    read: Callable[[ReadHandle], None]


def once(read: Callable[[], None]) -> None:
    """An attempt without a second one."""
    read()


def read_portions(
    portions: Iterable[Portion], nbytes: int, options: ReadOptions, attempt: Attempt = once
) -> None:
    """Read all, begun in their order and each within an attempt; the first error ends it and is raised.

    `nbytes` is about how many bytes they are together. How many threads take part is decided by where the
    first of them lie; a process that asks late may find there what another one has just brought in. What
    comes lazily is made by whichever thread has time.
    """
    coming = iter(portions)
    first = next(coming, None)
    if first is None:
        return
    spare = [KeptOpen()]

    def read(one: Portion) -> None:
        files = spare.pop() if spare else KeptOpen()
        try:
            attempt(lambda: _read(one, files))
        finally:
            spare.append(files)

    try:
        each(read, chain([first], coming), nbytes, _threads(first, spare[0], options))
    finally:
        for files in spare:
            files.close()


def _read(one: Portion, files: KeptOpen) -> None:
    with files.reading(one.storage, one.path) as handle:
        one.read(handle)


def _threads(first: Portion, files: KeptOpen, options: ReadOptions) -> int:
    # What is wrong is said by whoever reads.
    with suppress(OSError), files.reading(first.storage, first.path) as handle:
        return options.threads_for(handle, first.begin, first.nbytes)
    return options.threads
