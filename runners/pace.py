"""How quickly a run goes and how long it will take: arithmetic on moments that were noted before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Moment(NamedTuple):
    """The time of the monotonic clock at which so much was done, or was first seen to be."""

    secs: float
    done: float


def rate(moments: Sequence[Moment], over_secs: float, now_secs: float) -> float | None:
    """How much was done per second over the last `over_secs`, or longer where one unit takes longer.

    The moments are in the order of time, and at each more was done than before. What runs on now is not done:
    where it takes longer than that rate tells, the rate is less. None while nothing tells.
    """
    if len(moments) < 2:
        return None
    last = moments[-1]
    recent = bisect_left(moments, last.secs - over_secs, key=lambda one: one.secs)
    first = moments[min(recent, len(moments) - 2)]
    done = last.done - first.done
    if last.secs <= first.secs or done <= 0:
        return None
    return min(done / (last.secs - first.secs), (done + 1) / (now_secs - first.secs))


def steps_left(
    epoch: int, step: int, steps: int | None, last_epoch: int | None, total: int, last_step: int | None
) -> int | None:
    """Steps to the end of the run, where its limits tell; None where they do not.

    `step` of `steps` are done in epoch `epoch`, `total` in all; epochs to come are taken to be as long.
    """
    left = []
    if last_epoch is not None and steps is not None:
        left.append(max(steps - step, 0) + max(last_epoch - epoch, 0) * steps)
    if last_step is not None:
        left.append(max(last_step - total, 0))
    return min(left, default=None)


def eta_secs(left: float | None, per_sec: float | None, secs_left: float | None = None) -> float | None:
    """Seconds to the end: by what is left at that rate, at most `secs_left`, which a limit on time leaves."""
    if left is None or (left > 0 and not per_sec):
        return secs_left
    work = left / per_sec if per_sec else 0.0
    return work if secs_left is None else min(work, secs_left)


def duration(secs: float) -> str:
    """`00:12:33`, with days `2-00:12:33`; whole seconds, rounded up, so that 0 means over."""
    whole = max(0, -int(-secs // 1))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def per_second(value: float, unit: str) -> str:
    """`41.2 steps/s`; slower than one in ten seconds, `12.5 s/step`."""
    if 0 < value < 0.1:
        return f"{1 / value:.3g} s/{unit.removesuffix('s')}"
    return f"{value:.3g} {unit}/s"
