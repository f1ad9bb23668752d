"""The warden of a host: a small process without torch that sees what no thread of a rank can.

    ranks of the host      a connection each; the kernel tells of their end, /proc whether they are scheduled
    the first host's       the other hosts' wardens connect to it; both sides send ten beats per silence

It finds ranks that are frozen, ranks that ended without a word and hosts that are silent; what it finds
goes to all wardens and from them to all ranks. It never starves, however busy the ranks are. Ranks that
still live half a minute after a failure are killed. It ends with the last rank of its host.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import BinaryIO

from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher_status import Failure, tell_stderr
from torchrelay.runners.distributed.liveness import (
    JsonLineSocket,
    Message,
    Stillness,
    connect_to,
    pulse_of,
)

BEATS_PER_SILENCE = 10
CONNECT_SECS = 5.0
COMING_SECS = 60.0
STRANGERS = 256
"""Connections that have not said who they are; more of them, and the oldest goes: our own say it at once."""
LOST_PEER = 6
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Orders:
    """What a warden is told at its start.

    `silence`, `look`, `kill` (how long ranks may live after a failure) and `hung` (how long a main thread may
    be in one uninterruptible call) are in seconds. `shared` says
    that other hosts' wardens come to this one, `hub` where the first host's is (`addresses`, `port`, `host`,
    `ranks`), None for that one itself.
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
        """Read what `encode` of the line's other end made."""
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
    frozen: Stillness = field(default_factory=Stillness)
    main: Stillness = field(default_factory=Stillness)

    @property
    def gone(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.left or self.ended

    def was(self) -> str:
        """What it said last that it was doing."""
        if self.phase is None:
            return "what it was doing is not known"
        with suppress(OSError):
            text = os.pread(self.phase.fileno(), 4096, 0).rstrip(b"\0").decode(errors="replace")
            return f"it was in {text}"
        return "what it was doing is not known"


@dataclass
class Host:
    """Another host, by the connection to its warden; nothing is expected after a `bye`."""

    line: JsonLineSocket
    name: str
    ranks: tuple[int, ...]
    silent: float = 0.0
    left: bool = False


class Warden:
    """The state of a warden; `round` looks once at everything."""

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
        """Connect to the first host's warden; what hinders it is a failure of the job."""
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
        self._fail(
            min(self._ranks),
            f"{self.orders.host} reaches the warden of {hub['host']} at none of "
            f"{', '.join(hub['addresses'])} (port {hub['port']}): "
            "let the processes of all hosts connect to each other",
        )

    @property
    def done(self) -> bool:
        """Whether no rank of this host needs watching any more."""
        if time.monotonic() - self._began < COMING_SECS and any(
            rank.line is None and not rank.gone for rank in self._ranks.values()
        ):
            return False
        return all(rank.gone or rank.line is None for rank in self._ranks.values())

    def round(self) -> None:
        """Wait for at most a look for something to happen, hear it, and look at everything when due."""
        for descriptor, _ in self._poll.poll(int(self.orders.look * 1000)):
            if descriptor in self._on:  # else another message of the same moment has closed it
                self._on[descriptor]()
        now = time.monotonic()
        passed = now - self._looked_at
        if passed >= self.orders.look / 2:
            self._looked_at = now
            self._look(min(passed, 2 * self.orders.look), now)  # a pause of this process is no silence

    def leave(self) -> None:
        """Tell the other wardens that nothing is expected of this host any more."""
        for host in self._hosts:
            host.line.send({"bye": True})

    # Hearing

    def _listen_to(self, descriptor: int, act: Callable[[], None]) -> None:
        """From now on call `act` when there is something to read."""
        self._on[descriptor] = act
        self._poll.register(descriptor, select.POLLIN)

    def _listen_to_line(self, line: JsonLineSocket, act: Callable[[], None]) -> None:
        """The same for a connection; it is forgotten once it is closed."""
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
                self._greet(oldest)  # it may have spoken meanwhile
                if oldest in self._strangers:
                    self._send_away(oldest)

    def _send_away(self, line: JsonLineSocket) -> None:
        self._strangers.pop(line, None)
        self._ignore(line.link.fileno())
        line.close()

    def _greet(self, line: JsonLineSocket) -> None:
        """The first message says with the session's token who it is."""
        hello = line.first()
        if hello is None and not line.closed:
            return
        hello = hello or {}
        if hello.get("token") != self.orders.token:
            self._send_away(line)
            return
        self._strangers.pop(line, None)
        self._ignore(line.link.fileno())
        if "host" in hello:
            self._take_host(Host(line, str(hello["host"]), tuple(hello["ranks"])))
        elif hello.get("rank") in self._ranks:
            self._take_rank(self._ranks[hello["rank"]], line, hello)

    def _take_host(self, host: Host) -> None:
        self._hosts.append(host)
        self._listen_to_line(host.line, partial(self._hear_host, host))
        self._tell_all_again(host.line)
        self._hear_host(host)  # what came with its first message

    def _take_rank(self, rank: Rank, line: JsonLineSocket, hello: Message) -> None:
        rank.line, rank.thread = line, int(hello["thread"])
        with suppress(OSError):
            rank.phase = open(hello["phase"], "rb", buffering=0)  # noqa: SIM115 - open as long as the rank
        self._listen_to_line(line, partial(self._hear_rank, rank))
        self._tell_all_again(line)
        self._hear_rank(rank)

    def _tell_all_again(self, line: JsonLineSocket) -> None:
        if self.failure is not None:
            line.send({"failure": self.failure.encode().decode()})

    def _hear_rank(self, rank: Rank) -> None:
        if rank.line is None:
            return
        if any("left" in message for message in rank.line.receive()):
            rank.left = True
        if rank.line.closed and rank.descriptor is None and not rank.ended:
            self._note_end(rank)

    def _note_end(self, rank: Rank) -> None:
        """Its process has ended; what it said before comes first."""
        if rank.descriptor is not None:
            self._ignore(rank.descriptor)
            self._hear_rank(rank)
        rank.ended = True
        if not rank.left:
            why = "ended without a word (killed, out of memory, or crashed)"
            self._fail(rank.rank, f"{why}; {rank.was()}")

    def _hear_host(self, host: Host) -> None:
        for message in host.line.receive():
            host.silent = 0.0
            host.left = host.left or "bye" in message
            if "failure" in message:
                self._spread(Failure.decode(message["failure"].encode()))
        if host.line.closed and not host.left:
            host.left = True
            self._lose(host, "ended without a word: all its processes are gone, or its warden was killed")

    # Looking

    def _look(self, passed: float, now: float) -> None:
        for rank in self._ranks.values():
            if not rank.gone and rank.line is not None:
                self._look_at(rank, passed)
        for host in self._hosts:
            host.silent += passed
            if host.silent >= self.orders.silence and not host.left:
                host.left = True
                self._lose(
                    host, f"was not heard of for {host.silent:.0f} s (host or network lost, or frozen)"
                )
        if now - self._beat_at >= self.orders.silence / BEATS_PER_SILENCE:
            self._beat_at = now
            for host in self._hosts:
                host.line.send({"beat": True})
        if self.failure is not None and now - self._failed_at >= self.orders.kill:
            self._kill()

    def _look_at(self, rank: Rank, passed: float) -> None:
        still = rank.frozen.look(pulse := pulse_of(rank.pid, rank.thread), passed)
        if pulse is not None and still >= self.orders.silence:
            what = f"has been frozen for {still:.0f} s ({pulse.meaning()}); no stack can be had of it"
            self._fail(rank.rank, f"{what}; {rank.was()}")
        pulse = pulse_of(rank.pid, rank.pid)
        hung = rank.main.look(pulse if pulse and pulse.state == "D" else None, passed)
        if hung >= self.orders.silence and not rank.warned:
            rank.warned = True
            what = f"has been in one system call for {hung:.0f} s"
            tell_stderr(f"torchrelay: {self._name(rank.rank)} {what}; {rank.was()}\n")
        if hung >= self.orders.hung:
            self._fail(rank.rank, f"has been in one system call for {hung:.0f} s; {rank.was()}")

    # Telling

    def _lose(self, host: Host, what: str) -> None:
        ranks = f"rank{'s' if len(host.ranks) > 1 else ''} {', '.join(map(str, host.ranks[:16]))}"
        self._spread(_failure(host.ranks[0], host.name, f"host {host.name} with {ranks} {what}"))

    def _fail(self, rank: int, what: str) -> None:
        self._spread(_failure(rank, self.orders.host, f"{self._name(rank)} {what}"))

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self.orders.pids[rank]} on {self.orders.host})"

    def _spread(self, failure: Failure) -> None:
        """Tell all ranks and wardens of the first failure."""
        if self.failure is not None:
            return
        self.failure, self._failed_at = failure, time.monotonic()
        lines = [rank.line for rank in self._ranks.values()] + [host.line for host in self._hosts]
        for line in lines:
            if line is not None and not line.closed:
                self._tell_all_again(line)

    def _kill(self) -> None:
        for rank in self._ranks.values():
            if not rank.gone and rank.descriptor is not None:
                what = f"is killed: it lives {self.orders.kill:g} s after the failure"
                tell_stderr(f"torchrelay: {self._name(rank.rank)} {what}\n")
                with suppress(OSError):
                    signal.pidfd_send_signal(rank.descriptor, signal.SIGKILL)
                rank.left = True


def _failure(rank: int, host: str, text: str) -> Failure:
    return Failure(rank, host, "the job", f"PeerError: {text}", LOST_PEER)


def listen(*, shared: bool) -> socket.socket:
    """Listen where the own ranks, and with `shared` the other hosts, can connect; raises OSError."""
    listener = None
    if shared and socket.has_dualstack_ipv6():
        with suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listener = listener or socket.create_server(("" if shared else "127.0.0.1", 0))
    listener.setblocking(False)
    return listener


def main(arguments: Sequence[str] = ()) -> None:
    """Read orders from stdin, print the port, watch until the ranks are gone."""
    for name in _IGNORED:  # a launcher's signals are for the ranks; the warden ends with them
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    orders = Orders.decode(sys.stdin.buffer.readline())
    listener = listen(shared=orders.shared)
    warden = Warden(orders, listener)
    warden.join()
    print(listener.getsockname()[1], flush=True)  # not before: no rank goes on whose host would not be missed
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    while not warden.done:
        warden.round()
    warden.leave()
