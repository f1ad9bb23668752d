"""Waiting until stopped processes really stand still, before what they do to a device is looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL_SECS = 0.001


def await_stillness(pid: int, limit_secs: float) -> None:
    """Wait until no thread of a stopped process runs any more, at most so long.

    A stop reaches a thread that is in a system call when that ends. A save behind the training may be in the
    middle of a write or a sync; were the device copied meanwhile, the copy would be as after no power cut.
    """
    until = time.monotonic() + limit_secs
    while time.monotonic() < until and _moves(pid):
        time.sleep(_POLL_SECS)


def members(group: int) -> Iterator[int]:
    """The processes of a group."""
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(entry)) == group:
                yield int(entry)


def _moves(pid: int) -> bool:
    """Whether a thread of a process is neither stopped nor gone."""
    with suppress(OSError):
        return any(
            status.read_text().rpartition(")")[2].split()[0] not in "TtZX"
            for status in Path(f"/proc/{pid}/task").glob("*/stat")
        )
    return False
