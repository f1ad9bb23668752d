"""The host monitor: a small process without torch that sees what no thread of a rank can.

    ranks of the host      one connection each; the kernel reports their exit, /proc whether they are
    scheduled the first host's       the other hosts' monitors connect to it; both sides send ten beats per
    `silence`

It detects frozen ranks, ranks that exited unannounced, and silent hosts, and reports them to all monitors and
through them to all ranks. It keeps running however busy the ranks are. It kills ranks that are still alive
half a minute after a failure, and exits after the last rank of its host.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import BinaryIO

from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher import Failure, write_stderr
from torchrelay.runners.distributed.liveness import JsonLineSocket, Message, StallTimer, connect_to, pulse_of

BEATS_PER_SILENCE = 10
CONNECT_SECS = 5.0
COMING_SECS = 60.0
STRANGERS = 256
"""Most unidentified connections; more, and the oldest is closed: own processes identify themselves soon."""
LOST_PEER = 6
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Orders:
    """The start parameters of a host monitor.

    Seconds: `silence`, `look`, `kill` (how long ranks may live after a failure) and `hung` (how long a main
    thread may be in one uninterruptible call). `shared`: monitors of other hosts connect to this one. `hub`:
    the first host's monitor (`addresses`, `port`, `host`, `ranks`), None for that one itself.
    """

    token: str
    host: str
    pids: dict[int, int]
    silence: float
    look: float
    shared: bool
    hub: Message | None = None
    kill: float = 30.0
    hung: float = 75.0

    @classmethod
    def decode(cls, line: bytes) -> Orders:
        """Decode the line that a rank sends at the start."""
        fields = json.loads(line)
        fields["pids"] = {int(rank): pid for rank, pid in fields["pids"].items()}
        return cls(**fields)


@dataclass
class Rank:
    """A rank of this host."""

    rank: int
    pid: int
    descriptor: int | None
    line: JsonLineSocket | None = None
    thread: int = 0
    phase: BinaryIO | None = None
    left: bool = False
    ended: bool = False
    warned: bool = False
    frozen: StallTimer = field(default_factory=StallTimer)
    main: StallTimer = field(default_factory=StallTimer)

    @property
    def gone(self) -> bool:
        """True if nothing more is expected of this rank."""
        return self.left or self.ended

    def was(self) -> str:
        """Describe what the rank was doing when it last reported it."""
        if self.phase is None:
            return "its last activity is unknown"
        with suppress(OSError):
            text = os.pread(self.phase.fileno(), 4096, 0).rstrip(b"\0").decode(errors="replace")
            return f"it was in {text}"
        return "its last activity is unknown"


@dataclass
class Host:
    """Another host, by the connection to its monitor; nothing is expected after a `bye`."""

    line: JsonLineSocket
    name: str
    ranks: tuple[int, ...]
    silent: float = 0.0
    left: bool = False


class HostMonitor:
    """The state of a host monitor; each `round` checks everything once."""

    def __init__(self, orders: Orders, listener: socket.socket) -> None:
        self.orders = orders
        self.failure: Failure | None = None
        self._listener = listener
        self._ranks: dict[int, Rank] = {}
        for rank, pid in orders.pids.items():
            self._ranks[rank] = Rank(rank, pid, None)
            with suppress(AttributeError, OSError):
                self._ranks[rank].descriptor = os.pidfd_open(pid)
        self._hosts: list[Host] = []
        self._strangers: dict[JsonLineSocket, None] = {}
        self._poll = select.poll()
        self._on: dict[int, Callable[[], None]] = {}
        self._listen_to(listener.fileno(), self._accept)
        for one in self._ranks.values():
            if one.descriptor is not None:
                self._listen_to(one.descriptor, partial(self._note_end, one))
        self._began = self._looked_at = time.monotonic()
        self._beat_at = self._failed_at = 0.0

    def join(self) -> None:
        """Connect to the first host's monitor; an error is a failure of the job."""
        if self.orders.hub is None:
            return
        hub = self.orders.hub
        for address in hub["addresses"]:
            with suppress(OSError):
                line = connect_to(address, hub["port"], CONNECT_SECS)
                names = {"host": self.orders.host, "ranks": sorted(self._ranks)}
                line.send({"token": self.orders.token, **names})
                self._take_host(Host(line, hub["host"], tuple(hub["ranks"])))
                return
        first, here, there = self._ranks[min(self._ranks)], self.orders.host, ", ".join(hub["addresses"])
        text = f"{here} cannot reach the host monitor of {hub['host']} at any of {there} (port {hub['port']})"
        self._report(first.rank, here, f"{self._name(first)} {text}: allow connections between all hosts")

    @property
    def done(self) -> bool:
        """True if no rank of this host needs to be watched any more."""
        if time.monotonic() - self._began < COMING_SECS and any(
            rank.line is None and not rank.gone for rank in self._ranks.values()
        ):
            return False
        return all(rank.gone or rank.line is None for rank in self._ranks.values())

    def round(self) -> None:
        """Wait at most one `look` for events, handle them, and check everything if due."""
        for descriptor, _ in self._poll.poll(int(self.orders.look * 1000)):
            if descriptor in self._on:  # else another event of this round has closed it
                self._on[descriptor]()
        now = time.monotonic()
        passed = now - self._looked_at
        if passed >= self.orders.look / 2:
            self._looked_at = now
            self._look(
                min(passed, 2 * self.orders.look), now
            )  # a pause of this process does not count as silence

    def leave(self) -> None:
        """Announce to the other monitors that nothing is expected of this host any more."""
        for host in self._hosts:
            host.line.send({"bye": True})

    # Messages

    def _listen_to(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` whenever there is something to read."""
        self._on[descriptor] = act
        self._poll.register(descriptor, select.POLLIN)

    def _listen_to_line(self, line: JsonLineSocket, act: Callable[[], None]) -> None:
        """Do the same for a connection, until it is closed."""
        descriptor = line.link.fileno()

        def hear() -> None:
            act()
            if line.closed:
                self._ignore(descriptor)

        self._listen_to(descriptor, hear)

    def _ignore(self, descriptor: int) -> None:
        if self._on.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _accept(self) -> None:
        with suppress(OSError):
            line = JsonLineSocket(self._listener.accept()[0])
            self._strangers[line] = None
            self._listen_to_line(line, partial(self._greet, line))
            if len(self._strangers) > STRANGERS:
                oldest = next(iter(self._strangers))
                self._greet(oldest)  # its first message may have arrived by now
                if oldest in self._strangers:
                    self._reject(oldest)

    def _reject(self, line: JsonLineSocket) -> None:
        self._strangers.pop(line, None)
        self._ignore(line.link.fileno())
        line.close()

    def _greet(self, line: JsonLineSocket) -> None:
        """Read the first message, which identifies a rank or host by the session's token."""
        hello = line.first()
        if hello is None and not line.closed:
            return
        hello = hello or {}
        if hello.get("token") != self.orders.token:
            self._reject(line)
            return
        self._strangers.pop(line, None)
        self._ignore(line.link.fileno())
        if "host" in hello:
            self._take_host(Host(line, str(hello["host"]), tuple(hello["ranks"])))
        elif hello.get("rank") in self._ranks:
            rank = self._ranks[hello["rank"]]
            rank.line, rank.thread = line, int(hello["thread"])
            with suppress(OSError):
                rank.phase = open(hello["phase"], "rb", buffering=0)  # noqa: SIM115 - open as long as the rank
            self._listen_to_line(line, partial(self._receive_from_rank, rank))
            self._send_failure(line)
            self._receive_from_rank(rank)

    def _take_host(self, host: Host) -> None:
        self._hosts.append(host)
        self._listen_to_line(host.line, partial(self._receive_from_host, host))
        self._send_failure(host.line)
        self._receive_from_host(host)  # messages that arrived with the first one

    def _send_failure(self, line: JsonLineSocket) -> None:
        if self.failure is not None:
            line.send({"failure": self.failure.encode().decode()})

    def _receive_from_rank(self, rank: Rank) -> None:
        """Handle messages of a rank, and its exit if the kernel cannot report it."""
        if rank.line is None:
            return
        if any("left" in message for message in rank.line.receive()):
            rank.left = True
        if rank.line.closed and rank.descriptor is None and not rank.ended:
            self._note_end(rank)

    def _note_end(self, rank: Rank) -> None:
        """Handle the exit of a rank's process, after its last messages."""
        if rank.descriptor is not None:
            self._ignore(rank.descriptor)
            self._receive_from_rank(rank)
        rank.ended = True
        if not rank.left:
            why = "died unexpectedly (killed, out of memory, or crashed)"
            self._fail(rank, why)

    def _receive_from_host(self, host: Host) -> None:
        """Handle messages of another host, and the loss of its connection."""
        for message in host.line.receive():
            host.silent = 0.0
            host.left = host.left or "bye" in message
            if "failure" in message:
                self._spread(Failure.decode(message["failure"].encode()))
        if host.line.closed and not host.left:
            why = "all its processes are gone, or its monitor was killed"
            self._lose(host, f"disconnected unexpectedly: {why}")

    # Checks

    def _look(self, passed: float, now: float) -> None:
        """Check ranks and hosts, send beats, and kill ranks when due."""
        for rank in self._ranks.values():
            if not rank.gone and rank.line is not None:
                self._look_at(rank, passed)
        for host in self._hosts:
            host.silent += passed
            if host.silent >= self.orders.silence and not host.left:
                self._lose(host, f"was silent for {host.silent:.0f} s (host or network lost, or frozen)")
        if now - self._beat_at >= self.orders.silence / BEATS_PER_SILENCE:
            self._beat_at = now
            for host in self._hosts:
                host.line.send({"beat": True})
        if self.failure is not None and now - self._failed_at >= self.orders.kill:
            self._kill()

    def _look_at(self, rank: Rank, passed: float) -> None:
        """Check if a rank is frozen or hangs in one system call."""
        still = rank.frozen.update(pulse := pulse_of(rank.pid, rank.thread), passed)
        if pulse is not None and still >= self.orders.silence:
            what = f"has been frozen for {still:.0f} s ({pulse.meaning()}); its stack cannot be read"
            self._fail(rank, what)
        pulse = pulse_of(rank.pid, rank.pid)
        hung = rank.main.update(pulse if pulse and pulse.state == "D" else None, passed)
        what = f"has been in one system call for {hung:.0f} s"
        if hung >= self.orders.silence and not rank.warned:
            rank.warned = True
            write_stderr(f"torchrelay: {self._name(rank)} {what}; {rank.was()}\n")
        if hung >= self.orders.hung:
            self._fail(rank, what)

    # Reports

    def _lose(self, host: Host, what: str) -> None:
        host.left = True
        ranks = f"rank{'s' if len(host.ranks) > 1 else ''} {', '.join(map(str, host.ranks[:16]))}"
        self._report(host.ranks[0], host.name, f"host {host.name} with {ranks} {what}")

    def _fail(self, rank: Rank, what: str) -> None:
        self._report(rank.rank, self.orders.host, f"{self._name(rank)} {what}; {rank.was()}")

    def _report(self, rank: int, host: str, text: str) -> None:
        self._spread(Failure(rank, host, "the job", f"PeerError: {text}", LOST_PEER))

    def _name(self, rank: Rank) -> str:
        return f"rank {rank.rank} (pid {rank.pid} on {self.orders.host})"

    def _spread(self, failure: Failure) -> None:
        """Record the first failure and send it to all ranks and monitors."""
        if self.failure is not None:
            return
        self.failure, self._failed_at = failure, time.monotonic()
        lines = [rank.line for rank in self._ranks.values()] + [host.line for host in self._hosts]
        for line in lines:
            if line is not None and not line.closed:
                self._send_failure(line)

    def _kill(self) -> None:
        for rank in self._ranks.values():
            if not rank.gone and rank.descriptor is not None:
                what = f"is killed: it is still alive {self.orders.kill:g} s after the failure"
                write_stderr(f"torchrelay: {self._name(rank)} {what}\n")
                with suppress(OSError):
                    signal.pidfd_send_signal(rank.descriptor, signal.SIGKILL)
                rank.left = True


def listen(*, shared: bool) -> socket.socket:
    """Listen for the own ranks, and with `shared` for other hosts; raises OSError."""
    listener = None
    if shared and socket.has_dualstack_ipv6():
        with suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listener = listener or socket.create_server(("" if shared else "127.0.0.1", 0))
    listener.setblocking(False)
    return listener


def main() -> None:
    """Read the orders from stdin, print the port, and watch until all ranks are gone."""
    for name in _IGNORED:  # a launcher's signals are for the ranks; the monitor exits after them
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    orders = Orders.decode(sys.stdin.buffer.readline())
    listener = listen(shared=orders.shared)
    monitor = HostMonitor(orders, listener)
    monitor.join()
    print(listener.getsockname()[1], flush=True)  # only now: no rank continues unmonitored
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    while not monitor.done:
        monitor.round()
    monitor.leave()
