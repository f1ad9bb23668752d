"""Connections that have only so long: no client holds a place for ever by sending a byte now and then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Lines:
    """Which connections are waited for, and until when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def hold(self, line: socket.socket, secs: float) -> None:
        """Wait for this one for so long from now."""
        with self._lock:
            self._until[line] = self._clock() + secs

    def let_go(self, line: socket.socket) -> None:
        """It may take as long as it takes, or is closed."""
        with self._lock:
            self._until.pop(line, None)

    def cut(self) -> None:
        """Hang up where the time is over: the thread that waits there finds the end of the connection."""
        now = self._clock()
        with self._lock:
            late = [line for line, until in self._until.items() if until <= now]
            for line in late:
                del self._until[line]
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
