"""The HTTP server of a run store: bounded connections, and pages kept until their files change."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import policy, report_page
from torchrelay.tools.report.run_data import ReadLimits, RunFacts
from torchrelay.tools.report.run_list import RunIndex, glance, index_page, signature

Headers = Mapping[str, str] | Message
COOKIE = "torchrelay"
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Without a token only this machine is served, under a name of itself; with one, whoever knows it."""

    port: int
    token: str | None = None

    def host_fits(self, host: str | None) -> bool:
        """Whether the Host header names this machine.

        A page of another site whose name was made to lead here (DNS rebinding) sends that name. With a
        token it cannot know what it would have to send.
        """
        if self.token is not None:
            return True
        name, _, port = (
            (host or "").rpartition(":")
            if (host or "").rpartition(":")[2].isdecimal()
            else (host or "", "", "80")
        )
        return is_loopback(name.strip("[]").lower()) and port == str(self.port)

    def token_fits(self, query: str, headers: Headers) -> bool:
        """Whether a request carries the token: as a bearer, a cookie, or `?token=`."""
        if self.token is None:
            return True
        return any(
            _same(one, self.token) for one in (_bearer(headers), _cookie(headers), token_in(query)) if one
        )


def checked(host: str, port: int, token: str | None) -> Access:
    """The access of a server at an address; raises UsageError where others could look without a token."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise UsageError(
            f"the token is too short or has other signs than letters and digits: give at least "
            f"{SHORTEST_TOKEN} of these, for example those that openssl rand -hex 16 prints"
        )
    if token is None and not is_loopback(host.lower()):
        raise UsageError(
            f"--host {host} lets other machines look at every run: give a --token that they must know, or "
            "leave --host out and come through an ssh tunnel"
        )
    return Access(port, token)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine, for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_in(query: str) -> str:
    """What a query string gives as `token`; empty where it does not."""
    try:
        return parse_qs(query, max_num_fields=16).get("token", [""])[0]
    except ValueError:
        return ""


def _bearer(headers: Headers) -> str:
    kind, _, value = (headers.get("Authorization") or "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("Cookie") or "").get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(said: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(said.encode(errors="replace"), token.encode())


class ConnectionTimeouts:
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


_MOST_PAGES = 64
_PAUSE_SECS = 1.0
_SHARE = 8.0
"""A page is made anew no earlier than after so many times what it took: at most an eighth of a core."""


@dataclass(frozen=True)
class Page:
    """What a client gets: `tag` is another one whenever the content may be."""

    tag: str
    body: bytes


@dataclass
class _Kept:
    state: str
    page: Page
    not_before: float


class Rendered:
    """A cache of pages by key. `render` gets a text to put where the page is to name its own tag."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def page(self, key: str, state: str, render: Callable[[str], str]) -> Page:
        """The page of a key at a state of its files, or a slightly older one where it was made just now."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # whoever comes meanwhile gets the page that is being made
            kept = self._kept.get(key)
            began = self._clock()
            if kept is not None and (kept.state == state or began < kept.not_before):
                return kept.page
            page = _tagged(render)
            now = self._clock()
            self._keep(key, _Kept(state, page, now + max(_PAUSE_SECS, _SHARE * (now - began))))
            return page

    def _keep(self, key: str, kept: _Kept) -> None:
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_PAGES:
                gone, _ = self._kept.popitem(last=False)
                self._locks.pop(gone, None)


def _tagged(render: Callable[[str], str]) -> Page:
    """A page that says its own tag, which is of its content: what looks the same has the same tag."""
    here = secrets.token_hex(16)  # nothing in a run can spell it
    text = render(here)
    tag = hashlib.sha256(text.replace(here, "").encode()).hexdigest()[:32]
    return Page(f'"{tag}"', text.replace(here, f"&quot;{tag}&quot;").encode())


_AT_ONCE = 32
"""Requests that are answered at a time; more are told to come again."""
_PATIENCE_SECS = 10.0
_HEARD_SECS, _SENT_SECS = 20.0, 120.0
"""How long a request may take to come, and an answer to go, however little of it moves at a time."""
_LONGEST_PATH = 4096
_HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Pages:
    """The pages of a store, made when they are asked for."""

    def __init__(self, store: RunIndex, limits: ReadLimits, rendered: Rendered) -> None:
        self.store = store
        self.limits = limits
        self._rendered = rendered
        self._glances: dict[str, tuple[str, RunFacts]] = {}

    def index(self) -> Page:
        """The list of runs; runs whose files are as they were are not read again."""
        states = [(run, signature(run)) for run in self.store.runs()]
        state = repr([(run.name, seen) for run, seen in states])
        return self._rendered.page("", state, lambda tag: self._list(states, tag))

    def of_run(self, name: str) -> Page | None:
        """The page of a run; None where the listing has none of this name."""
        run = self.store.run(name)
        if run is None:
            return None
        return self._rendered.page(
            f"run {name}",
            signature(run),
            lambda tag: report_page([gather(run, self.limits)], live=tag, back="/"),
        )

    def _list(self, states: Sequence[tuple[RunDirectory, str]], tag: str) -> str:
        known = self._glances
        self._glances = {
            run.name: known[run.name] if known.get(run.name, ("",))[0] == seen else (seen, glance(run))
            for run, seen in states
        }
        return index_page(self.store.shown, [facts for _, facts in self._glances.values()], tag)


class DashboardServer(ThreadingHTTPServer):
    """Serves a store at an address. Raises UsageError for an address that cannot be had."""

    daemon_threads = True
    block_on_close = False  # whoever still reads a page does not hold the end up
    request_queue_size = 64

    def __init__(
        self,
        store: RunIndex,
        host: str,
        port: int,
        token: str | None,
        limits: ReadLimits,
        rendered: Rendered | None = None,
    ) -> None:
        self.access = checked(host, port, token)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = Pages(store, limits, rendered or Rendered())
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self.lines = ConnectionTimeouts()
        try:
            super().__init__((host, port), _ConnectionHandler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports go up to 65535"
            raise UsageError(
                f"cannot serve at {host} port {port}: {reason}; choose another --port"
            ) from error
        self.access = checked(host, self.server_address[1], token)

    @property
    def url(self) -> str:
        """Where the list of runs is."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or hang up where too many are being answered."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As the base class does, and make room again."""
        self.lines.hold(request, _HEARD_SECS)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.lines.let_go(request)
            self._room.release()

    def service_actions(self) -> None:
        """Hang up on clients that are too slow; called twice a second."""
        self.lines.cut()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is told as the base class does.

        Neither is a line that was hung up here: a signal that comes while a line is accepted closes it, and
        the thread that was to answer finds it closed.
        """
        gone = isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError))
        if not gone and request.fileno() != -1:
            super().handle_error(request, client_address)


class _ConnectionHandler(BaseHTTPRequestHandler):
    """One connection. Nothing of a request is used but its path, its query's token, and four headers."""

    server: DashboardServer
    timeout = _PATIENCE_SECS
    server_version = "torchrelay"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page, or with a line that says why not."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """The same without the page."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A line of text: nothing that the client sent comes back in it."""
        self._send(
            HTTPStatus(code), f"{HTTPStatus(code).phrase}\n".encode(), with_body=self.command != "HEAD",
            kind="text/plain; charset=utf-8",
        )  # fmt: skip

    def _answer(self, *, with_body: bool) -> None:
        access = self.server.access
        self.server.lines.let_go(self.connection)  # a page may take long to be made
        try:
            parts = urlsplit(self.path[:_LONGEST_PATH])
        except ValueError:  # an address in brackets that is none
            return self.send_error(HTTPStatus.BAD_REQUEST)
        if not access.host_fits(self.headers.get("Host")):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        if not access.token_fits(parts.query, self.headers):
            return self.send_error(HTTPStatus.UNAUTHORIZED)
        if access.token is not None and token_in(parts.query):
            return self._remember(parts.path, access.token)
        page = self._page(parts.path)
        if page is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        if self.headers.get("If-None-Match") == page.tag:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", tag=page.tag)
        return self._send(HTTPStatus.OK, page.body, tag=page.tag, with_body=with_body)

    def _page(self, path: str) -> Page | None:
        if path == "/":
            return self.server.pages.index()
        name = path.removeprefix("/run/")
        return self.server.pages.of_run(unquote(name)) if name != path else None

    def _remember(self, path: str, token: str) -> None:
        """Take the token out of the address and into a cookie, so that it stands in no history."""
        self._send(
            HTTPStatus.SEE_OTHER,
            b"",
            {
                "Location": path if path.startswith("/run/") else "/",
                "Set-Cookie": f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/",
            },
        )

    def _send(
        self,
        status: HTTPStatus,
        body: bytes,
        more: dict[str, str] | None = None,
        *,
        tag: str | None = None,
        with_body: bool = True,
        kind: str = "text/html; charset=utf-8",
    ) -> None:
        self.close_connection = True
        self.server.lines.hold(self.connection, _SENT_SECS)
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {}), **({"ETag": tag} if tag else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if with_body and body:
            self.wfile.write(body)
