"""Waiting for a save that goes on behind the training, from within a task."""

from __future__ import annotations

import threading

from torchrelay.checkpoint.save.background import SAVES


def nothing_in_flight(secs: float = 60.0) -> None:
    """Return when no thread of this process saves; fails where one does for ever."""
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if all(thread.name != SAVES for thread in threading.enumerate()):
            return
        pause.wait(0.01)
    raise AssertionError("a save does not end")
