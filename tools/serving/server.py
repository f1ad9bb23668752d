"""The server as a process: an address of its own, patient connections, a way out that is bounded.

SIGTERM and SIGINT: no new connections, `/ready` says 503, requests that are being answered have `drain_secs`,
what is left then gets a 503, and the process ends with 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchrelay.errors import UsageError
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.serving.app import Application, Doorkeeper
from torchrelay.tools.serving.batching import Computing, Queue
from torchrelay.tools.serving.errors import BUSY_SECS
from torchrelay.tools.serving.handlers import ModelSlot
from torchrelay.tools.serving.monitoring import Meters, Watching
from torchrelay.tools.serving.requests import Predicting

_FULL = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {BUSY_SECS}\r\nContent-Length: 0\r\n"
    "Connection: close\r\n\r\n"
).encode()


def patient(limits: RequestLimits) -> type[H11Protocol]:
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


_HEAD_BYTES = 32 << 10
_LAST_SECS = 2.0
"""Beyond `drain_secs`: for writing the last refusals."""
_BACKLOG = 2048
_KEEP_ALIVE_SECS = 30


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything is loaded; raises UsageError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "ports go up to 65535"
        raise UsageError(f"cannot serve at {host} port {port}: {reason}; choose another --port") from error
    return found


def url_of(listening: socket.socket) -> str:
    """Where it is asked."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class Running:
    """One server: what is served, what computes, what listens."""

    def __init__(
        self,
        holder: ModelSlot,
        listening: socket.socket,
        limits: RequestLimits,
        door: Doorkeeper,
        watching: Watching | None = None,
    ) -> None:
        self.holder, self.limits, self.meters = holder, limits, Meters()
        self._socket, self._watching = listening, watching
        queue = Queue(limits)
        self._computing = Computing(queue, self.meters)
        self._predicting = Predicting(holder, queue, limits)
        application = Application(holder, self._predicting, self._computing, self.meters, door, limits)
        self._server = _Server(application, limits, self._drain, self._computing.close)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal, or `stop`; `ready` is called when connections are taken."""
        self._computing.start()
        if self._watching is not None:
            self._watching.start(self.holder, self.meters)
        self._server.ready = ready
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._computing.close()
            if self._watching is not None:
                self._watching.stop()

    def ended(self) -> bool:
        """Whether, after `run`, no thread computes or loads any more; waits a little for that."""
        watched = self._watching is None or self._watching.ended(_LAST_SECS / 2)
        return self._computing.ended(_LAST_SECS / 2) and watched

    def stop(self) -> None:
        """Leave as after SIGTERM; for other threads."""
        self._server.should_exit = True

    def _drain(self) -> None:
        self.holder.draining = True


class _Server(uvicorn.Server):
    """uvicorn's, with the end that is told above."""

    def __init__(
        self,
        application: Application,
        limits: RequestLimits,
        drain: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        super().__init__(_config(application, limits))
        self.ready: Callable[[], None] = lambda: None
        self._limits, self._drain, self._close = limits, drain, close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: what is being answered has its seconds, then it is refused."""
        self._drain()
        timer = asyncio.get_running_loop().call_later(self._limits.drain_secs, self._close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have signals end this; they are not raised again, because leaving was what they asked for."""
        try:
            before = {one: signal.signal(one, self._asked) for one in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: whoever runs this stops it
            yield
            return
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _config(application: Application, limits: RequestLimits) -> Any:
    return uvicorn.Config(
        application,
        http=patient(limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECS,
        timeout_graceful_shutdown=int(limits.drain_secs + _LAST_SECS),
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
