"""Short JSON messages, one per line, over a socket that never blocks.

Whatever is odd in them (too long, no JSON object) ends the connection: only our own processes talk here.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_MOST_BYTES = 256 << 10


class Lines:
    """One end of a connection; `closed` once the other end is gone or talked nonsense."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.closed = False
        self._waiting = b""
        self._unsent = b""
        self._come: list[Message] = []

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the next send where the other end takes nothing now."""
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > _MOST_BYTES:
            self.closed = True
        while self._unsent and not self.closed:
            try:
                self._unsent = self._unsent[self.link.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self.closed = True

    def first(self) -> Message | None:
        """Return only the next message, if one has come; never waits."""
        self._read()
        return self._come.pop(0) if self._come else None

    def receive(self) -> list[Message]:
        """Return the messages that have come; never waits."""
        self._read()
        come, self._come = self._come, []
        return come

    def _read(self) -> None:
        while not self.closed:
            try:
                data = self.link.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._waiting += data
            self.closed = self.closed or not data or len(self._waiting) > _MOST_BYTES
        *whole, self._waiting = self._waiting.split(b"\n")
        try:
            self._come += [_message(line) for line in whole]
        except (ValueError, RecursionError):  # the second: thousands of brackets, within each other
            self.closed = True

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self.link.close()


def _message(line: bytes) -> Message:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def connect_to(address: str, port: int, secs: float) -> Lines:
    """Connect within `secs`; raises OSError."""
    return Lines(socket.create_connection((address, port), secs))
