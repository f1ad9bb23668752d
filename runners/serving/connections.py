"""Connections that are patient for a while: half heads, idle ones and readers that do not read are let go."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchrelay.runners.programs.serve_options import Limits
from torchrelay.runners.serving.refusal import BUSY_SECS

_FULL = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {BUSY_SECS}\r\nContent-Length: 0\r\n"
    "Connection: close\r\n\r\n"
).encode()


def patient(limits: Limits) -> type[H11Protocol]:
    """The class of connections that these limits make: uvicorn makes an object of it for each."""

    class Patient(H11Protocol):
        """uvicorn's protocol, with an end to each wait for the client."""

        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Take it, unless there are too many."""
            if len(self.connections) >= limits.connections:
                transport.write(_FULL)
                transport.close()
                self.transport = transport
                return
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(limits.head_secs, transport.abort)

        def data_received(self, data: bytes) -> None:
            """A head has so many seconds from its first byte on, however many pieces it comes in."""
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                _end(self._head_timer)
                self._head_timer = None
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_secs, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            """No timer outlives it."""
            _end(self._head_timer)
            _end(self._write_timer)
            self._unset_keepalive_if_required()
            if self in self.connections:
                super().connection_lost(exc)

        def pause_writing(self) -> None:
            """The client does not read: it has so long to begin."""
            super().pause_writing()
            _end(self._write_timer)
            self._write_timer = self.loop.call_later(limits.secs, self.transport.abort)

        def resume_writing(self) -> None:
            """It reads."""
            super().resume_writing()
            _end(self._write_timer)

        def timeout_keep_alive_handler(self) -> None:
            """An idle connection ends; one whose answer nobody took in is cut."""
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

    return Patient


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
