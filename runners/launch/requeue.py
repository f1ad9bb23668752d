"""Whether an attempt that is over is queued again by whoever started it. Pure but for a look at the notes."""

from __future__ import annotations

from pathlib import Path

from torchrelay.errors import NoProgressError
from torchrelay.runners.distributed.launcher_status import heard
from torchrelay.runners.launch.verdict import PREEMPTED, Verdict

MOST_IDLE = 3
"""So many starts in a row may be ended before any run began; a run counts its own starts from there on."""


def wants_requeue(verdict: Verdict, restart: int, budget: int) -> bool:
    """Whether a job is to be queued again after its start number `restart` (0: the first).

    A preempted run always is, as often as it takes; with a budget of restarts at most so often, and then a
    lost rank counts, too. A run that gets no further ends by itself, with 93.
    """
    if budget and restart >= budget:
        return False
    return verdict.code == PREEMPTED or (verdict.again and budget > 0)


def idle_starts(launch: Path, restart: int) -> int:
    """How many starts in a row, `restart` the last of them, were over before any run had begun.

    `launch` is the directory of the launch. A program that is no run of torchrelay never begins one.
    """
    idle = 0
    while idle <= restart and not heard(launch / f"attempt_{restart - idle}", "run.json"):
        idle += 1
    return idle


def without_end(verdict: Verdict, idle: int, budget: int) -> Verdict:
    """The verdict of a start: 93 where it would be repeated for ever, and nothing tells of progress."""
    if verdict.code != PREEMPTED or budget or idle < MOST_IDLE:
        return verdict
    return Verdict(
        NoProgressError.exit_code,
        f"{idle} starts in a row were ended before a run began, so that nothing shows that they get further: "
        "give them a longer time limit or a shorter notice; for a program that saves by itself say "
        "--max-restarts",
    )
