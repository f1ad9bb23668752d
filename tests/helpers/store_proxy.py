"""Between a client and a store: passes requests on, counts them, has faults happen to them by a schedule."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
FAULTS = ("500", "503", "reset before", "reset after", "silence", "slow", "cut")
"""Refused, before the store sees it; connection reset, before and after the store did it; done and never
answered; answered in drops; an answer of which the second half is missing."""
_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "expect"})
_SLOWLY = 0.3


@dataclass(frozen=True)
class Asked:
    """A request as the schedule sees it: the number counts from 0, `path` is without the query."""

    number: int
    method: str
    path: str
    query: str
    nbytes: int
    conditional: bool = False


@dataclass(frozen=True)
class Seen:
    """A request and what the store said; status 0 where it never got it."""

    asked: Asked
    status: int
    fault: str
    got: int = 0


Schedule = Callable[[Asked], str]
"""The fault that happens to a request; nothing for none."""


@dataclass
class Proxy:
    """`schedule` may be changed at any time; `seen` grows, `fired` counts faults."""

    upstream: int
    dropped: frozenset[str] = frozenset()
    """Headers of requests, in small letters, that the store never sees: so it knows nothing of them."""
    schedule: Schedule = field(default=lambda asked: "")
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    count: int = 0

    def choose(self, method: str, target: str, nbytes: int, conditional: bool) -> tuple[Asked, str]:
        """What is asked, and what happens to it."""
        path, _, query = target.partition("?")
        with self.lock:
            asked = Asked(self.count, method, path, query, nbytes, conditional)
            self.count += 1
            return asked, self.schedule(asked)

    def note(self, seen: Seen) -> None:
        """Remember what became of a request."""
        with self.lock:
            self.seen.append(seen)
            if seen.fault:
                self.fired[seen.fault] += 1

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Requests by method within the block, as they are when it has ended."""
        found: Counter[str] = Counter()
        first = len(self.seen)
        yield found
        found.update(one.asked.method for one in self.seen[first:])


def in_turn(every: int, among: Sequence[str] = FAULTS) -> Schedule:
    """To each of `every` requests the fault that happened least often, of those that can happen to it."""
    used = Counter(dict.fromkeys(among, 0))

    def choose(asked: Asked) -> str:
        fitting = [one for one in among if asked.method == "GET" or one not in ("cut", "slow")]
        if asked.number % every or not fitting:
            return ""
        chosen = min(reversed(fitting), key=used.__getitem__)
        used[chosen] += 1
        return chosen

    return choose


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_any(self) -> None:
        body = self._body()
        asked, fault = self.proxy.choose(self.command, self.path, len(body), "If-None-Match" in self.headers)
        if fault in ("500", "501", "503"):
            self.proxy.note(Seen(asked, 0, fault))
            return self._refuse(int(fault))
        if fault == "reset before":
            self.proxy.note(Seen(asked, 0, fault))
            return self._reset()
        try:
            status, headers, data = self._forwarded(body)
        except (OSError, HTTPException):  # the store is away, or ended
            self.proxy.note(Seen(asked, 0, ""))
            return self._reset()
        self.proxy.note(Seen(asked, status, fault, len(data)))
        if fault == "reset after":
            return self._reset()
        if fault == "silence":
            self.proxy.ended.wait(60)
            return self._reset()
        return self._answer(status, headers, data, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = handle_any

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        line = HTTPConnection(HOST, self.proxy.upstream, timeout=60)
        try:
            line.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, text in self.headers.items():
                if name.lower() not in _HOP | self.proxy.dropped:
                    line.putheader(name, text)
            line.putheader("Content-Length", str(len(body)))
            line.putheader("Connection", "close")
            line.endheaders(body)
            answer = line.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            line.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: str) -> None:
        self.send_response_only(status)
        told = next((text for name, text in headers if name.lower() == "content-length"), "0")
        for name, text in headers:
            if name.lower() not in _HOP:
                self.send_header(name, text)
        if status not in (204, 304):
            self.send_header("Content-Length", told if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault == "cut" and data:
            self.wfile.write(data[: len(data) // 2])
            return self._reset(gently=True)
        if fault == "slow":
            for at in range(0, len(data), max(1, len(data) // 10)):
                self.wfile.write(data[at : at + max(1, len(data) // 10)])
                self.wfile.flush()
                time.sleep(_SLOWLY / 10)
            return None
        self.wfile.write(data)
        return None

    def _refuse(self, status: int) -> None:
        code = {503: "SlowDown", 501: "NotImplemented"}.get(status, "InternalError")
        data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
        self._answer(status, [("Content-Type", "application/xml")], data, "")

    def _reset(self, *, gently: bool = False) -> None:
        self.wfile.flush()
        if not gently:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with suppress(OSError):
            self.connection.close() if not gently else self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients that went away are no news."""


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A proxy in front of a web server on loopback; whoever waits in vain there is let go in the end."""
    proxy = Proxy(port)
    with _Server((HOST, 0), type("Handler", (_Handler,), {"proxy": proxy})) as server:
        proxy.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.ended.set()
            server.shutdown()
            thread.join()
