"""Where the time of a save or load went, and how long the others wait for the slowest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from torchrelay.records import dataclass

BASE_PATIENCE_SECS = 600.0
SLOWEST_BYTES_PER_SEC = 10e6
"""A rank that writes slower than this on top of the base is late."""


@dataclass
class Clock:
    """Seconds by phase of this process."""

    secs: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.secs[phase] = self.secs.get(phase, 0.0) + time.monotonic() - start


def patience_secs(nbytes: int) -> float:
    """How long the others wait for a rank that writes or reads so much from a very slow disk."""
    return BASE_PATIENCE_SECS + nbytes / SLOWEST_BYTES_PER_SEC
