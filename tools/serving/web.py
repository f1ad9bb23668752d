"""Shared by the model server and the dashboard: access control, sockets, uvicorn. Imports no torch."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Worker
from torchrelay.records import dataclass

T = TypeVar("T")
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Access rule: with a token, requests that send it; without one, only requests to localhost."""

    port: int
    token: str | None = None

    def refusal(self, headers: Mapping[str, str], *also: str) -> tuple[int, str] | None:
        """Return status and reason for a refused request; the token is a bearer token or one of `also`."""
        if self.token is None:
            # DNS rebinding: a page of another site sends that site's host name.
            host = headers.get("host", "")
            name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", "80")
            here = is_loopback(name.strip("[]").lower()) and port == str(self.port)
            return None if here else (421, "this server only answers to localhost")
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        said = [bearer.strip() if kind.lower() == "bearer" else "", *also]
        # in constant time
        if any(hmac.compare_digest(one.encode(errors="replace"), self.token.encode()) for one in said):
            return None
        return 401, "send the header Authorization: Bearer TOKEN"


def access_at(host: str, port: int, token: str | None) -> Access:
    """Return the access rule of an address; raises UsageError for other machines without a token."""
    if token is None and not is_loopback(host.lower()):
        raise UsageError(
            f"--host {host} lets other machines ask: give --token-file with a token that they must send"
        )
    return Access(port, token)


def read_token(token: str | None, path: str | None) -> str | None:
    """Return the given token, or that of a file; raises UsageError for an invalid one."""
    where = "--token"
    if path is not None:
        where = f"--token-file {path}"
        try:
            token = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise UsageError(f"{where} cannot be read: {why}") from None
    if token is None:
        return None
    good = token.isascii() and token.isprintable() and " " not in token
    if len(token) < _SHORTEST_TOKEN or not good:
        raise UsageError(
            f"{where}: expected at least {_SHORTEST_TOKEN} ASCII characters without spaces, for example what "
            "openssl rand -hex 16 prints"
        )
    return token


def is_loopback(host: str) -> bool:
    """Return True for a loopback name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket before anything is loaded; raises UsageError if that fails."""
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
    """Return the URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class HttpServer(uvicorn.Server):
    """uvicorn server; a signal shuts it down without being raised again, a second one ends it at once."""

    def __init__(self, application: Any, **options: Any) -> None:
        fixed: dict[str, Any] = {
            "http": "h11",
            "ws": "none",
            "lifespan": "off",
            "loop": "asyncio",
            "interface": "asgi3",
            "log_config": None,
            "access_log": False,
            "proxy_headers": False,
            "server_header": False,
            "timeout_keep_alive": 30,
            "h11_max_incomplete_event_size": 32 << 10,
        }
        super().__init__(uvicorn.Config(application, **fixed, **options))
        self.ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and call `ready`."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on a signal."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def done_by(worker: Worker, work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result; it keeps running if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        result, failed = None, None
        try:
            result = None if future.cancelled() else work()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, future, result, failed)

    if worker.submit(run) is None:
        raise RuntimeError("cannot start another thread")
    return await future


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the result of a future, unless it was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
