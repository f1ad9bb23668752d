"""Whether the processes around this one still live, told by the kernel at once.

A `pidfd` becomes readable when its process ends, also as a zombie, and is not fooled by a pid
that is used again. It sees only processes of the own pid namespace.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchrelay.records import dataclass


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
    host = socket.gethostname()
    return ProcessId(rank, os.getpid(), host, f"{host}/{_boot_id()}/{_pid_namespace()}")


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


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


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
