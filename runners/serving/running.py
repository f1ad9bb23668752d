"""The server as a process: an address of its own, the event loop, and a way out that is bounded.

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

import uvicorn

from torchrelay.errors import UsageError
from torchrelay.runners.programs.serve_options import Limits
from torchrelay.runners.serving.access import Doorkeeper
from torchrelay.runners.serving.application import Application
from torchrelay.runners.serving.batching import Queue
from torchrelay.runners.serving.computing import Computing
from torchrelay.runners.serving.connections import patient
from torchrelay.runners.serving.meters import Meters
from torchrelay.runners.serving.predicting import Predicting
from torchrelay.runners.serving.served import Holder
from torchrelay.runners.serving.watching import Watching

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
        holder: Holder,
        listening: socket.socket,
        limits: Limits,
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
        self, application: Application, limits: Limits, drain: Callable[[], None], close: Callable[[], None]
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


def _config(application: Application, limits: Limits) -> Any:
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
