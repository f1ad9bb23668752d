"""Detect dead and frozen processes by the kernel, by /proc and by messages over non-blocking sockets.

A `pidfd` becomes readable when its process ends, also as a zombie, and is not confused by a reused pid. It
only sees processes of the own pid namespace.

A watcher thread is scheduled at least twice a second, however busy its process is, because it polls or asks
for Python's lock every 5 ms. So its count of context switches stands still only if the kernel does not run
the process at all: stopped, in a freezer, or traced.

Messages are short JSON objects, one per line. An invalid message ends the connection: only own processes
connect here.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.records import dataclass

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in a freezer, or in a system call that does not return",
}


@dataclass(frozen=True)
class Pulse:
    """State of a thread at one moment: the kernel's letter, and how often it was scheduled."""

    state: str
    switches: int

    def meaning(self) -> str:
        """Describe the state."""
        return f"state {self.state}, {_STATES.get(self.state, 'not scheduled')}"


def pulse_of(pid: int, thread: int) -> Pulse | None:
    """Read the state of a thread; None if it is gone or not visible."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        switches = int(rows["voluntary_ctxt_switches"]) + int(rows["nonvoluntary_ctxt_switches"])
        return Pulse(rows["State"].split()[0], switches)
    except (KeyError, ValueError, IndexError):
        return None


@dataclass
class StallTimer:
    """Measure how long a thread has not been scheduled, sampled by the caller."""

    secs: float = 0.0
    pulse: Pulse | None = None

    def update(self, pulse: Pulse | None, passed_secs: float) -> float:
        """Add a sample, taken `passed_secs` after the previous one; return the seconds of the stall."""
        still = pulse is not None and self.pulse is not None and pulse.switches == self.pulse.switches
        self.secs = self.secs + passed_secs if still else 0.0
        self.pulse = pulse
        return self.secs


@dataclass(frozen=True)
class ProcessId:
    """A process as other ranks know it; processes of the same `group` can see each other."""

    rank: int
    pid: int
    host: str
    group: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def own_process(rank: int) -> ProcessId:
    """Describe this process."""
    host, boot, namespace = socket.gethostname(), "unknown", "unknown"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return ProcessId(rank, os.getpid(), host, f"{host}/{boot}/{namespace}")


def is_orphan(parent: int) -> bool:
    """Return True if the launcher, which had this pid when the process asked first, is gone.

    A process adopted by init is an orphan too. In a container the first process may be the launcher itself: a
    Python program, or one whose child has its variables.
    """
    if os.getppid() != parent or parent != 1:
        return os.getppid() != parent
    try:
        words = Path("/proc/1/cmdline").read_bytes().split(b"\0")[:2]
        started = b"TORCHELASTIC_RUN_ID=" in Path("/proc/1/environ").read_bytes()
    except PermissionError:  # a process of another user
        started = False
    except OSError:
        return False
    return not (started or any(b"python" in word or b"torchrun" in word for word in words))


class LifeLines:
    """Watch named processes of this pid namespace; close it after use."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._names: dict[int, str] = {}
        self._poll = select.poll()
        self._ended: set[str] = set()
        for name, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(name)
            except (AttributeError, OSError):  # an old kernel, or not Linux: only heartbeats are available
                continue
            else:
                self._names[descriptor] = name
                self._poll.register(descriptor, select.POLLIN)

    def ended(self, wait_secs: float = 0.0) -> set[str]:
        """Wait at most `wait_secs` for an exit; return the names that exited since the last call."""
        events = self._poll.poll(int(wait_secs * 1000))
        names, self._ended = self._ended, set()
        return names | {self._forget(descriptor) for descriptor, _ in events}

    def close(self) -> None:
        """Stop watching."""
        for descriptor in list(self._names):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> str:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._names.pop(descriptor)


def by_group(processes: Iterable[ProcessId]) -> dict[str, list[int]]:
    """Return the ranks of each group; groups and ranks in rank order."""
    groups: dict[str, list[int]] = {}
    for process in sorted(processes, key=lambda process: process.rank):
        groups.setdefault(process.group, []).append(process.rank)
    return groups


Message = dict[str, Any]

_MOST_BYTES = 256 << 10


class JsonLineSocket:
    """One end of a connection; `closed` after the other end is gone or sent an invalid message."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link, self.closed = link, False
        self._waiting = self._unsent = b""
        self._come: list[Message] = []

    def send(self, message: Message) -> None:
        """Send a message; if the other end cannot take it now, keep it for the next send."""
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
        """Return only the next received message, if any; never waits."""
        self._read()
        return self._come.pop(0) if self._come else None

    def receive(self) -> list[Message]:
        """Return the received messages; never waits."""
        self._read()
        come, self._come = self._come, []
        return come

    def _read(self) -> None:
        """Read what has arrived and split it into messages."""
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
            come = [json.loads(line) for line in whole]
            if not all(isinstance(one, dict) for one in come):
                raise ValueError("not an object")
            self._come += come
        except (ValueError, RecursionError):  # the second: thousands of nested brackets
            self.closed = True

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self.link.close()


def connect_to(address: str, port: int, secs: float) -> JsonLineSocket:
    """Connect within `secs`; raises OSError."""
    return JsonLineSocket(socket.create_connection((address, port), secs))
