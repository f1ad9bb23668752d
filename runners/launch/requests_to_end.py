"""Signals to the launcher: remembered, and passed on to the agents, which pass them on to their ranks."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_IMPATIENT_SECS = 5.0
"""A second signal within this time is the first one again."""


class RequestsToEnd:
    """While the block runs SIGTERM, SIGINT and SIGUSR1 ask the launch to end. Mutable; main thread only.

    `pending` is a signal that the agents have not been sent; `hurry` says that somebody asked again, later.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.pending: int | None = None
        self.hurry = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> RequestsToEnd:
        try:
            self._before = {int(one): signal.signal(one, self._hear) for one in _SIGNALS}
        except ValueError:  # not the main thread: whoever has it decides
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self.pending, self._first = signal.Signals(number).name, number, now
        elif now - self._first > _IMPATIENT_SECS:
            self.hurry = True
