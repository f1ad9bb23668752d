"""What this process is doing, readable from outside even when it is stopped or its interpreter is busy.

The text lies in memory that has a file descriptor, so the warden of the host reads it through /proc.
Saying a phase costs microseconds and never waits.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = 512


class Phase:
    """The phases of all threads of this process; `place` is where others read them, or empty."""

    def __init__(self) -> None:
        self.place = ""
        self._memory: mmap.mmap | None = None
        self._now: dict[int, str] = {}

    def text(self) -> str:
        """What the threads said that they are doing."""
        return "; ".join(list(self._now.values())) or "nothing that it told of"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say that the calling thread does `what` until the block ends."""
        thread = threading.get_ident()
        before = self._now.get(thread)
        self._say(thread, what if before is None else f"{before}, {what}")
        try:
            yield
        finally:
            self._say(thread, before)

    def show(self) -> str:
        """Make the phases readable for others from now on; return the place."""
        if self._memory is None:
            self._open()
        self._write()
        return self.place

    def _open(self) -> None:
        try:
            number = os.memfd_create("torchrelay-phase")
            os.ftruncate(number, _BYTES)
            self._memory = mmap.mmap(number, _BYTES)
        except (AttributeError, OSError):  # no Linux, or no memory for it: nobody can read it then
            return
        self.place = f"/proc/{os.getpid()}/fd/{number}"

    def _say(self, thread: int, what: str | None) -> None:
        if what is None:
            self._now.pop(thread, None)
        else:
            self._now[thread] = what
        self._write()

    def _write(self) -> None:
        if self._memory is not None:
            self._memory[:_BYTES] = self.text().encode()[: _BYTES - 1].ljust(_BYTES, b"\0")


phase = Phase()
"""The phases of this process."""


def stack_of_main_thread(most: int = 8) -> str:
    """Return where the main thread is now, innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < most:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls) or "unknown"
