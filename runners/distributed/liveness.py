"""Whether processes live, told by the kernel, by /proc and by messages over sockets that never block.

A `pidfd` becomes readable when its process ends, also as a zombie, and is not fooled by a pid that is used
again. It sees only processes of the own pid namespace.

A watcher's thread is scheduled at least twice a second however busy its process is: it looks, or it asks
for Python's lock every 5 ms. So its count of context switches stands still only where the kernel does
not run the process at all: stopped, in a freezer, or traced.

Messages are short JSON, one per line. Whatever is odd in them (too long, no JSON object) ends the connection:
only our own processes talk here.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.records import dataclass

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in a freezer, or in a system call that does not return",
}
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Pulse:
    """A thread at one moment: the kernel's letter for its state, and how often it was scheduled."""

    state: str
    switches: int

    def meaning(self) -> str:
        """Say what the state is."""
        return f"state {self.state}, {_STATES.get(self.state, 'not scheduled')}"


def pulse_of(pid: int, thread: int) -> Pulse | None:
    """Look at a thread; None where it is gone or the system does not tell."""
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


class Stillness:
    """For how long a pulse has not moved, counted in the looks of whoever looks."""

    def __init__(self) -> None:
        self.secs = 0.0
        self.pulse: Pulse | None = None

    def look(self, pulse: Pulse | None, passed_secs: float) -> float:
        """Note what is seen now and how long ago the last look was; return the seconds without a move."""
        still = pulse is not None and self.pulse is not None and pulse.switches == self.pulse.switches
        self.secs = self.secs + passed_secs if still else 0.0
        self.pulse = pulse
        return self.secs


@dataclass(frozen=True)
class ProcessId:
    """A process as its peers know it; `group` is the same where processes can see each other."""

    rank: int
    pid: int
    host: str
    group: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def own_process(rank: int) -> ProcessId:
    """Describe this process."""

    def told(ask: Callable[[], object]) -> str:
        try:
            return str(ask()).strip()
        except OSError:
            return "unknown"

    host = socket.gethostname()
    boot, namespace = told(Path("/proc/sys/kernel/random/boot_id").read_text), told(_NAMESPACE.readlink)
    return ProcessId(rank, os.getpid(), host, f"{host}/{boot}/{namespace}")


def is_orphan(parent: int) -> bool:
    """Whether the launcher is gone that was the parent, by this pid, when this process asked first.

    It was gone before where init has adopted this process. The first process of a container may be the
    launcher, which is a Python program, or what that started, which has its variables.
    """
    if os.getppid() != parent or parent != 1:
        return os.getppid() != parent
    try:
        words = Path("/proc/1/cmdline").read_bytes().split(b"\0")[:2]
        started = b"TORCHELASTIC_RUN_ID=" in Path("/proc/1/environ").read_bytes()
    except PermissionError:  # of another user's
        started = False
    except OSError:
        return False
    return not (started or any(b"python" in word or b"torchrun" in word for word in words))


class LifeLines:
    """Watches processes of this pid namespace by names of one's own; close it after use."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._names: dict[int, str] = {}
        self._poll = select.poll()
        self._ended: set[str] = set()
        for name, pid in pids.items():
            self._watch(name, pid)

    def ended(self, wait_secs: float = 0.0) -> set[str]:
        """Wait at most `wait_secs` for an end that was not told yet; return those that ended just now."""
        events = self._poll.poll(int(wait_secs * 1000))
        told, self._ended = self._ended, set()
        return told | {self._forget(descriptor) for descriptor, _ in events}

    def close(self) -> None:
        """Stop watching."""
        for descriptor in list(self._names):
            self._forget(descriptor)

    def _watch(self, name: str, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(name)
        except (AttributeError, OSError):  # an old kernel, or not Linux: heartbeats alone must do
            return
        else:
            self._names[descriptor] = name
            self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> str:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._names.pop(descriptor)


def by_group(processes: Iterable[ProcessId]) -> dict[str, list[int]]:
    """Return the ranks of each group, groups and ranks in rank order."""
    groups: dict[str, list[int]] = {}
    for process in sorted(processes, key=lambda process: process.rank):
        groups.setdefault(process.group, []).append(process.rank)
    return groups


Message = dict[str, Any]

_MOST_BYTES = 256 << 10


class JsonLineSocket:
    """One end of a connection; `closed` once the other end is gone or talked nonsense."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.closed = False
        self._waiting = b""
        self._unsent = b""
        self._come: list[Message] = []

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the next send where the other end takes nothing now."""
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
        """Return only the next message, if one has come; never waits."""
        self._read()
        return self._come.pop(0) if self._come else None

    def receive(self) -> list[Message]:
        """Return the messages that have come; never waits."""
        self._read()
        come, self._come = self._come, []
        return come

    def _read(self) -> None:
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
                raise ValueError("no object")
            self._come += come
        except (ValueError, RecursionError):  # the second: thousands of brackets, within each other
            self.closed = True

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self.link.close()


def connect_to(address: str, port: int, secs: float) -> JsonLineSocket:
    """Connect within `secs`; raises OSError."""
    return JsonLineSocket(socket.create_connection((address, port), secs))
