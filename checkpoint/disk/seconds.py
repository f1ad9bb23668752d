"""Where the time of a write went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchrelay.records import dataclass


@dataclass
class Seconds:
    """Seconds by phase: of one thread, or on average over the threads of a write.

    So they never add up to more than the time that passed. Copying to aligned memory counts as writing.
    """

    hash: float = 0.0
    write: float = 0.0
    fsync: float = 0.0

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        """Add the time of a block to `hash`, `write` or `fsync`."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.monotonic() - start)

    def add_mean(self, parts: Sequence[Seconds], threads: int) -> None:
        """Add what `threads` threads have counted in any number of parts."""
        for phase in ("hash", "write", "fsync"):
            total = sum(getattr(part, phase) for part in parts)
            setattr(self, phase, getattr(self, phase) + total / threads)
