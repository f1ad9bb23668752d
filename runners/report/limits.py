"""How much is read for a page, and a list of what could not be."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from torchrelay.errors import RelayError
from torchrelay.records import dataclass

T = TypeVar("T")
TEXT_LIMIT_BYTES = 256 << 10
MOST_LINES = 200_000
"""Of metrics, of events and of saves, so that no file of lines takes all memory."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what is read of one run."""

    epoch_rows: int = 300
    """Rows of the table of epochs, the newest ones."""
    sized_epochs: int = 24
    """Epochs whose manifest is read for sizes by blob."""
    manifest_bytes: int = 64 << 20
    stats_bytes: int = 64 << 20
    """The same for all manifests, and all `stats.json`, together."""
    normed_epochs: int = 16
    norm_bytes: int = 10**9
    """Bytes of weights that are read for norms; 0 reads none."""


@dataclass
class Troubles:
    """What could not be read, said once each, in the order in which it was met."""

    said: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Remember a sentence."""
        if text not in self.said:
            self.said.append(text)

    def tried(self, read: Callable[[], T], otherwise: T) -> T:
        """What `read` gives; `otherwise`, and the reason noted, where files are damaged or unreadable."""
        try:
            return read()
        except (RelayError, OSError) as error:
            self.note(str(error))
            return otherwise


def bounded(lines: Iterable[T], what: str, troubles: Troubles) -> Iterator[T]:
    """The first lines of a file of lines; that there are more is noted."""
    for number, line in enumerate(lines):
        if number == MOST_LINES:
            troubles.note(f"{what}: only the first {MOST_LINES} lines are shown")
            return
        yield line


def spread(items: Sequence[T], wanted: int) -> list[T]:
    """At most so many items, evenly spaced, the first and the last always among them."""
    if len(items) <= wanted or wanted < 2:
        return list(items[-wanted:]) if wanted > 0 else []
    last = len(items) - 1
    return [items[round(index * last / (wanted - 1))] for index in range(wanted)]


def small_text(path: Path, limit: int = TEXT_LIMIT_BYTES) -> str | None:
    """The beginning of a text file; None for what is no plain file: links lead out of the run."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(limit).decode(errors="replace")
    return None
