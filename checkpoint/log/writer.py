"""Who writes a log, and when somebody else may take it over.

Deciding is here (`judge`), pure but for asking the system about one process; watching and appending
are in `takeover.py`. Wall time decides nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.log.branches import LogView
from torchrelay.records import dataclass

Json = Any

_GONE_STATES = frozenset("ZX")
"""Zombies and dead processes: nothing of theirs runs any more."""


@dataclass(frozen=True)
class WriterIdentity:
    """The process that writes: enough to name it to people, and to tell later whether it is gone.

    An empty `boot_id` or `pid_namespace` (no /proc) equals no other. `launcher_id` is None outside
    of launchers; `restarts` counts the launcher's restarts, the outer launcher's first. `launch` is what the
    restarts of one launch share: two launches may well be given the same id. It is empty where nothing tells.
    """

    job: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_start: str
    launcher_id: str | None = None
    restarts: tuple[int, ...] = ()
    launch: str = ""

    @classmethod
    def here(
        cls, job: str, environment: Mapping[str, str] = os.environ, *, launch: str = ""
    ) -> WriterIdentity:
        """The identity of this process, which belongs to the `launch`."""
        launcher_id, restarts = _launcher(environment)
        return cls(
            job=job,
            host=socket.gethostname(),
            boot_id=_text_of("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link_of("/proc/self/ns/pid"),
            pid=os.getpid(),
            pid_start=process_start(os.getpid()) or "",
            launcher_id=launcher_id,
            restarts=restarts,
            launch=launch,
        )

    def json(self) -> dict[str, Json]:
        """As it lies in the records."""
        return {**asdict(self), "restarts": list(self.restarts)}


class Right(Enum):
    """What a would-be writer may do with a log."""

    AT_ONCE = "take it at once"
    WATCH = "take it if the holder's counter does not move"
    REFUSED = "not take it"


@dataclass(frozen=True)
class Verdict:
    """A right and the reason for it, in words."""

    right: Right
    reason: str


def judge(view: LogView, me: WriterIdentity, *, certain: bool, live_here: Container[str]) -> Verdict:
    """Whether `me` may take over the log that `view` tells.

    `certain` is False when newer records are damaged: one of them may be a takeover that we cannot
    read, so nothing that the older ones say about the holder counts. `live_here` are the nonces of
    the writers of this process that have not been closed: a process never takes over from itself.
    """
    holder = view.holder
    if holder.get("nonce") in live_here and not view.released:
        return Verdict(Right.REFUSED, "this very process writes there: close its other manager first")
    if not certain:
        return Verdict(Right.WATCH, "the newest record is damaged")
    if view.released:
        return Verdict(Right.AT_ONCE, "the log was released" if holder else "the log is new")
    if _same_system(holder, me):  # then the system knows, whatever launchers count
        if _gone(holder, me):
            return Verdict(Right.AT_ONCE, "the process that wrote there is gone")
    elif _restarted(holder, me):
        return Verdict(Right.AT_ONCE, "the launcher started this job again")
    return Verdict(Right.WATCH, "the process that wrote there may be alive")


def is_gone(noted: Mapping[str, Json]) -> bool | None:
    """Whether a process that was noted by `process_here` is gone; None where it is not of this system."""
    here = WriterIdentity.here("")
    if not _same_system(noted, here):
        return None
    return (noted.get("pid"), noted.get("pid_start")) != (here.pid, here.pid_start) and _gone(noted, here)


def process_here() -> dict[str, Json]:
    """What tells this process from all others, as it stands in notes."""
    here = WriterIdentity.here("").json()
    return {name: here[name] for name in ("host", "boot_id", "pid_namespace", "pid", "pid_start")}


def describe(holder: Mapping[str, Json], remedy: str) -> str:
    """Who holds a log, for an error message."""
    since = holder.get("since", "an unknown time")
    return (
        f"job {holder.get('job', '?')!r} on {holder.get('host', '?')} (pid {holder.get('pid', '?')}, "
        f"since {since}): {remedy}"
    )


def process_start(pid: int) -> str | None:
    """When a process started (clock ticks since boot), None if it is gone, "" if that cannot be told.

    A zombie counts as gone. Where /proc hides other users' processes the system is asked otherwise.
    """
    try:
        # Field 2 is the program's name in parentheses and may itself hold any character.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "" if _answers(pid) else None
    return None if fields[0] in _GONE_STATES else fields[19]


def _restarted(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    """Whether the launcher that started the holder has ended it and started us.

    A requeued Slurm job has no process left of its earlier start. An agent's restart is one of the same
    launch only: the ids of two launches, or of two steps of a job, may be equal, and each counts by itself.
    """
    before = holder.get("restarts")
    if me.launcher_id is None or holder.get("launcher_id") != me.launcher_id or not isinstance(before, list):
        return False
    if len(before) != len(me.restarts) or not tuple(before) < me.restarts:
        return False
    return before[:-1] < list(me.restarts[:-1]) or bool(me.launch and holder.get("launch") == me.launch)


def _same_system(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    same_boot = bool(me.boot_id) and holder.get("boot_id") == me.boot_id
    return same_boot and bool(me.pid_namespace) and holder.get("pid_namespace") == me.pid_namespace


def _gone(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    pid, start = holder.get("pid"), holder.get("pid_start")
    if type(pid) is not int or not isinstance(start, str) or not start:
        return False
    if (pid, start) == (me.pid, me.pid_start):
        return True  # our own process, in which no writer of that nonce lives any more
    now = process_start(pid)
    return now is None or now not in ("", start)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _launcher(environment: Mapping[str, str]) -> tuple[str | None, tuple[int, ...]]:
    torchrun = environment.get("TORCHELASTIC_RUN_ID", "none")
    elastic = _count(environment.get("TORCHELASTIC_RESTART_COUNT"))
    if torchrun not in ("", "none"):
        return f"torchrun:{torchrun}", (elastic,)
    slurm = environment.get("SLURM_JOB_ID")
    if slurm:
        return f"slurm:{slurm}", (_count(environment.get("SLURM_RESTART_COUNT")), elastic)
    return None, ()


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _text_of(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link_of(path: str) -> str:
    with suppress(OSError):
        return str(Path(path).readlink())
    return ""
