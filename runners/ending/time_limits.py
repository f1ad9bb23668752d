"""When this start of a run has to be over: as its user says, and as Slurm knows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torchrelay.errors import UsageError
from torchrelay.jobs.durations import seconds_in

SLURM_MARGIN_SECS = 30.0
"""Slurm's clock is coarse, and it sends SIGTERM at the end: better to be gone before."""

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
    """The deadlines of a start that begins now: of `limit_secs`, and of SLURM_JOB_END_TIME if it is set."""
    now = time.monotonic()
    found = []
    if limit_secs is not None:
        found.append(Deadline(now + limit_secs, f"the time limit of {limit_secs:g} s"))
    end = environ.get("SLURM_JOB_END_TIME", "")  # seconds since 1970; Slurm before 23 does not set it
    if end.isascii() and end.isdigit() and int(end) > time.time():
        left = int(end) - time.time()
        found.append(Deadline(now + left, "the end of the Slurm job", SLURM_MARGIN_SECS))
    return tuple(found)
