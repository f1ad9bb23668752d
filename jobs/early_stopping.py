"""Stop when a metric has not improved for some epochs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from torchrelay.errors import UsageError
from torchrelay.jobs.stop_condition import Rule, StopAnswer

Mode = Literal["min", "max"]
_NOT_IN_BLOB_NAMES = re.compile(r"[:*?\[\]@.]")


class EarlyStopping:
    """A stop condition whose memory (best value, epochs waited) is a blob, so that resuming goes on with it.

    All nodes see the same reduced metric and give the same answer; asked again in one epoch, it
    answers the same and counts nothing.
    """

    rule: Rule = "any"
    limit = False
    shared_by_nodes = True  # emulated nodes ask the same object

    def __init__(self, metric: str, mode: Mode, patience: int, min_delta: float) -> None:
        self.metric, self.mode, self.patience, self.min_delta = metric, mode, patience, min_delta
        self.name = f"early_stopping({metric})"
        self.blob_name = f"early_stopping/{_NOT_IN_BLOB_NAMES.sub('_', metric)}"
        self.best: float | None = None
        self.waited = 0
        self._asked_in = 0

    def __repr__(self) -> str:
        return f"{self.name}: best {self.best}, waited {self.waited} of {self.patience} epochs"

    def ask(self, ctx: Any) -> StopAnswer:
        """Take this epoch's value; raises UsageError naming the metrics there are when it is none of them."""
        if ctx.epoch != self._asked_in:
            self._take(_metric(ctx.metrics, self.metric))
            self._asked_in = ctx.epoch
        if self.waited < self.patience:
            return StopAnswer(False)
        best = "never had a finite value" if self.best is None else f"did not get better than {self.best:g}"
        return StopAnswer(True, f"{self.metric} {best} for {self.waited} epochs")

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain values."""
        return {"best": self.best, "waited": self.waited, "epoch": self._asked_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved memory."""
        best = state["best"]
        self.best = None if best is None else float(best)
        self.waited, self._asked_in = int(state["waited"]), int(state["epoch"])

    def _take(self, value: float) -> None:
        if self._improves(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta


def early_stopping(
    metric: str, mode: Mode = "min", patience: int = 3, min_delta: float = 0.0
) -> EarlyStopping:
    """Stop after `patience` epochs in a row in which `metric` did not get better.

    Better is below (mode "min") or above ("max") the best so far by more than `min_delta`. `metric` is
    a name given to `ctx.log`. NaN and infinite values are no improvement and never the best; 0.0 is a
    value like any other. An epoch that logs nothing under the name counts with the last value.
    Raises UsageError for arguments that cannot be.
    """
    if not isinstance(metric, str) or not metric:
        raise UsageError(f"early_stopping needs the name of a metric, not {metric!r}")
    if mode not in ("min", "max"):
        raise UsageError(f"early_stopping's mode is 'min' or 'max', not {mode!r}")
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise UsageError(f"early_stopping's patience is an integer from 1, not {patience!r}")
    if not _is_distance(min_delta):
        raise UsageError(f"early_stopping's min_delta is a number from 0, not {min_delta!r}")
    return EarlyStopping(metric, mode, patience, float(min_delta))


def _is_distance(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _metric(metrics: Mapping[str, float], name: str) -> float:
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none: no epoch task called ctx.log"
        raise UsageError(f"early_stopping waits for the metric {name!r}; there are: {known}")
    return float(metrics[name])
