"""Ranks whose agent was killed: nobody ends them but the launcher, who finds them by their surroundings."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchrelay.runners.distributed.launcher_status import DIRECTORY

_LOOK_SECS = 0.1


def end_left_behind(attempt: Path, secs: float, hurry: Callable[[], bool] = lambda: False) -> int:
    """End all processes that a rank of this attempt is or has started; returns how many there were.

    They are asked by SIGTERM, and killed `secs` later, or when there is `hurry`.
    """
    found = ranks_of(attempt)
    _send(found, signal.SIGTERM)
    end = time.monotonic() + secs
    while (left := ranks_of(attempt)) and time.monotonic() < end and not hurry():
        time.sleep(_LOOK_SECS)
    _send(left, signal.SIGKILL)
    return len(found)


def ranks_of(attempt: Path) -> list[int]:
    """The processes of this machine that live with the surroundings of a rank of this attempt."""
    mark = os.fsencode(f"{DIRECTORY}={attempt}")
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            known = path.read_bytes().split(b"\0")
            if mark in known and any(one.startswith(b"LOCAL_RANK=") for one in known):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
