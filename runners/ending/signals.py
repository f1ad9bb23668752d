"""Signals that ask a run to leave: their handlers raise a request and do nothing else.

A handler of Python does not run inside a collective; there the other ranks, which come to the next step,
bring the process out of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchrelay.runners.ending.requests import Requests

SAME_REQUEST_SECS = 5.0
"""A second SIGTERM within this time is the first one again: Slurm sends it to launcher and ranks, and the
launcher passes it on. A later one ends the process at once."""


@contextmanager
def signals_ask(requests: Requests) -> Iterator[None]:
    """While the block runs SIGTERM and SIGUSR1 raise a request; after it they are what they were.

    Only in the main thread, where Python has its handlers. A signal that is ignored, or that somebody
    handles outside of Python, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler(requests)
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def ignore_termination() -> None:
    """For the last moments of a process that leaves as asked: launchers end the others when one has left."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Handler:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._terminated: float | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._terminated is not None and now - self._terminated > SAME_REQUEST_SECS:
                os._exit(128 + number)
            self._terminated = self._terminated or now
        self._requests.preempt(signal.Signals(number).name)
