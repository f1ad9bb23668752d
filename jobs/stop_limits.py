"""Limits on a whole run: epochs, steps, time. Totals over all attempts.

The limit comes from the program as it is today, what was used of it from the checkpoint: a larger
number continues a run that had ended.
"""

from __future__ import annotations

import math
import re
from dataclasses import field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.jobs.stop_condition import Rule, StopAnswer, free_name
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.job import Job
    from torchrelay.jobs.workspace import Workspace

_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)")


@dataclass(frozen=True)
class MaxEpochs:
    """Stop after so many epochs."""

    epochs: int
    name: str = field(default="max_epochs", init=False)
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=True, init=False)

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the epochs done."""
        return _reached(ctx.epoch >= self.epochs, f"{self.epochs} epochs are done")


@dataclass(frozen=True)
class MaxSteps:
    """Stop after so many steps; `steps` also ends the running epoch."""

    steps: int
    name: str = field(default="max_steps", init=False)
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=True, init=False)

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the steps of all epochs."""
        return _reached(ctx.total_steps >= self.steps, f"{self.steps} steps are done")


@dataclass(frozen=True)
class MaxTime:
    """Stop after so many seconds of running; `secs` also ends the running epoch."""

    secs: float
    name: str = field(default="max_time", init=False)
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=True, init=False)

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the seconds of all attempts."""
        return _reached(ctx.elapsed_secs >= self.secs, f"{self.secs:g} s of running are over")


@dataclass(frozen=True)
class EpochLimit:
    """Stop when a node's own count of epochs, the blob `counter`, has reached `epochs`.

    `node` is the node that counts; None where every node does.
    """

    epochs: int
    counter: str
    node: str | None
    name: str
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=True, init=False)

    def ask(self, ctx: Any) -> StopAnswer:
        """Read the count; of a saved position that is not loaded yet, its epoch is the count."""
        workspace = getattr(ctx, "workspace", None)
        if workspace is None:
            return _reached(ctx.epoch >= self.epochs, self._reason)
        if self.node not in (None, workspace.node):
            return StopAnswer(False)
        return _reached(workspace[self.counter] >= self.epochs, self._reason)

    @property
    def _reason(self) -> str:
        return f"{self.epochs} epochs are done"


def max_epochs(n: int) -> MaxEpochs:
    """Stop after `n` epochs of the run, those of earlier attempts included; n >= 1."""
    return MaxEpochs(_count("max_epochs", n))


def max_steps(n: int) -> MaxSteps:
    """Stop after `n` steps of the run; the running epoch ends at that step and counts as a short one."""
    return MaxSteps(_count("max_steps", n))


def max_time(limit: str | float | timedelta) -> MaxTime:
    """Stop after this much running, summed over attempts: "HH:MM:SS", "D-HH:MM:SS", seconds, a timedelta.

    The running epoch ends at its next step and counts as a short one.
    """
    return MaxTime(_seconds(limit))


def epoch_limiter(job: Job, num_epochs: int) -> EpochLimit:
    """Stop `job` after `num_epochs` epochs, counted by a blob of the current node (else of every node).

    A task of the init group makes the count and one of the epoch group advances it, so it is saved
    with the epochs and continues on resume, while the limit is the one given today. Returns the
    condition, which is added to the job already. Raises UsageError unless num_epochs >= 1.
    """
    from torchrelay.jobs.cluster import Node
    from torchrelay.jobs.task import Task

    epochs = _count("epoch_limiter's num_epochs", num_epochs)
    node = Node.current(required=False)
    counter = free_name("epoch_limiter", {condition.name for condition in job.stop_conditions})

    def begin(ws: Workspace) -> None:
        ws[counter] = 0

    def advance(ws: Workspace) -> None:
        ws[counter] += 1

    Task(begin, name=f"begin_{counter}", group=job.init_group)
    Task(advance, name=f"advance_{counter}", group=job.epoch_group)
    condition = EpochLimit(epochs, counter, node.name if node else None, counter)
    job.add_stop_condition(condition)
    return condition


def _reached(stop: bool, reason: str) -> StopAnswer:
    return StopAnswer(True, reason) if stop else StopAnswer(False)


def _count(what: str, n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{what} is an integer from 1, not {n!r}")
    return n


def _seconds(limit: str | float | timedelta) -> float:
    secs = _plain_seconds(limit)
    if secs is None or not math.isfinite(secs) or secs <= 0:
        raise UsageError(
            f"max_time is 'HH:MM:SS', 'D-HH:MM:SS', seconds above 0 or a timedelta, not {limit!r}"
        )
    return secs


def _plain_seconds(limit: object) -> float | None:
    if isinstance(limit, timedelta):
        return limit.total_seconds()
    if isinstance(limit, str):
        match = _TIME.fullmatch(limit.strip())
        if match is None:
            return None
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        return float(timedelta(days=days, hours=hours, minutes=minutes, seconds=secs).total_seconds())
    if isinstance(limit, (int, float)) and not isinstance(limit, bool):
        return float(limit)
    return None
