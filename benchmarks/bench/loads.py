"""What comes before a load that is measured: which files the page cache has, and which memory is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bench.caches import bytes_below, make_cold, make_warm
from bench.memory import ready_memory

WARM_TRIES = 3


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
        """The tries of reads alone, by threads in each process: where a device delays them two at least."""
        cores = os.cpu_count() or 1
        return [max(2, 2 * cores // ranks)] if self._is_cold else [max(1, cores // ranks)] * WARM_TRIES

    @property
    def _is_cold(self) -> bool:
        return self.action == "cold load"
