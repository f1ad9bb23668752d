"""Between a client and any server on loopback: connections that are cut after so many bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HOST = "127.0.0.1"


@dataclass
class Relay:
    """`cut_after` has the bytes, both ways together, after which the next connections are cut, one each."""

    upstream: int
    port: int = 0
    cut_after: list[int] = field(default_factory=list)
    cuts: int = 0

    def serve(self, listening: socket.socket) -> None:
        """Take connections until the socket is closed."""
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                limit = self.cut_after.pop(0) if self.cut_after else None
                threading.Thread(target=self._pass_on, args=(client, limit), daemon=True).start()

    def _pass_on(self, client: socket.socket, limit: int | None) -> None:
        passed = [0]
        with client, socket.create_connection((HOST, self.upstream)) as server:
            for line in (client, server):  # else every small message waits for the one before it
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ways = [threading.Thread(target=self._pump, args=(a, b, passed, limit), daemon=True)
                    for a, b in ((client, server), (server, client))]  # fmt: skip
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _pump(
        self, source: socket.socket, target: socket.socket, passed: list[int], limit: int | None
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed[0] += len(data)
                if limit is not None and passed[0] >= limit:
                    self.cuts += 1
                    break
                target.sendall(data)
        for line in (source, target):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay in front of a server."""
    relay = Relay(port)
    with socket.create_server((HOST, 0)) as listening:
        relay.port = listening.getsockname()[1]
        threading.Thread(target=relay.serve, args=(listening,), daemon=True).start()
        yield relay
        listening.shutdown(socket.SHUT_RDWR)
