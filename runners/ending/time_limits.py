"""When this start of a run has to be over: as its user says, and as Slurm knows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import seconds_in
from torchrelay.records import dataclass

SLURM_MARGIN_SECS = 30.0
"""Slurm's clock is coarse, and it sends SIGTERM at the end: better to be gone before."""

END_TIME = "TORCHRELAY_END_TIME"
"""When `torchrelay launch` ends the job, in seconds since 1970."""
_LAUNCH_MARGIN_SECS = 5.0
_NOTICE = "TORCHRELAY_NOTICE_SECS"

TimeLimit = str | float | timedelta


@dataclass(frozen=True)
class Deadline:
    """A moment of the monotonic clock by which the process is gone, and how it is called."""

    at: float
    name: str
    margin_secs: float = 0.0


def seconds_of(limit: TimeLimit) -> float:
    """Seconds of `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"`, a timedelta; UsageError otherwise."""
    secs = seconds_in(limit)
    if secs is None or not math.isfinite(secs) or secs <= 0:
        raise UsageError(
            f"time_limit is {limit!r:.80}; give seconds above 0, a text such as '1h30m' or '01:30:00', "
            "or a timedelta"
        )
    return secs


def deadlines_of(limit_secs: float | None, environ: Mapping[str, str]) -> tuple[Deadline, ...]:
    """The deadlines of a start that begins now: of `limit_secs`, and those that its launcher has set."""
    found = []
    if limit_secs is not None:
        found.append(Deadline(time.monotonic() + limit_secs, f"the time limit of {limit_secs:g} s"))
    # Slurm before 23 sets no end by itself; `torchrelay launch --slurm` asks for it.
    for key, name, margin in (
        ("SLURM_JOB_END_TIME", "the end of the Slurm job", SLURM_MARGIN_SECS),
        (END_TIME, "the time limit of the launch", _LAUNCH_MARGIN_SECS),
    ):
        end = environ.get(key, "")
        if end.isascii() and end.isdigit() and int(end) > time.time():
            found.append(Deadline(time.monotonic() + int(end) - time.time(), name, margin))
    return tuple(found)


def notice_of(environ: Mapping[str, str], default: float) -> float:
    """How many seconds before the end SIGUSR1 comes, as `torchrelay launch` says; never below `default`."""
    text = environ.get(_NOTICE, "")
    return max(default, float(text)) if text.isascii() and text.isdigit() and len(text) <= 9 else default
