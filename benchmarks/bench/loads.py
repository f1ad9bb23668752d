"""What comes before a load that is measured: which files the page cache has, and which memory is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bench.caches import bytes_below, make_cold, make_warm
from bench.memory import ready_memory

COLD_THREADS, WARM_TRIES = 4, 3


@dataclass(frozen=True)
class Before:
    """What one process does before all of them load `nbytes` together; the same for all engines."""

    path: Path
    action: str
    nbytes: int

    def __call__(self) -> float | None:
        """The part of the files that is in the page cache all the same, where none of it is to be."""
        cached = make_cold(self.path) if self._is_cold else make_warm(self.path)
        ready_memory(2 * self.nbytes + min(self.nbytes, bytes_below(self.path)))
        return cached

    def threads(self, ranks: int) -> list[int]:
        """The tries of reads alone, by threads in each process; what a device delays more may hasten."""
        share = max(1, (os.cpu_count() or 1) // ranks)
        return [share, COLD_THREADS] if self._is_cold else [share] * WARM_TRIES

    @property
    def _is_cold(self) -> bool:
        return self.action == "cold load"
