"""Stop when a metric has not improved for some measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from torchrelay.errors import MissingMetricError, UsageError
from torchrelay.jobs.stop_condition import Rule, StopAnswer

Mode = Literal["min", "max"]
_NOT_IN_BLOB_NAMES = re.compile(r"[:*?\[\]@.]")


class EarlyStopping:
    """A stop condition whose memory (best value, measurements waited) is a blob, which a resume restores.

    All nodes see the same reduced metric and give the same answer. An epoch counts once, and only if it
    logged the metric: otherwise the answer stays as it was.
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
        return f"{self.name}: best {self.best}, waited {self.waited} of {self.patience} measurements"

    def ask(self, ctx: Any) -> StopAnswer:
        """Take this epoch's value, if it has one.

        Raises MissingMetricError, which names the metrics there are, while no epoch has logged it.
        """
        measured = getattr(ctx, "measured", ctx.metrics)  # who asks by hand may have metrics alone
        if self.metric not in ctx.metrics:
            known = ", ".join(sorted(ctx.metrics)) or "none: no epoch task called ctx.log"
            text = f"early_stopping waits for the metric {self.metric!r}; there are: {known}"
            raise MissingMetricError(text, self.metric)
        if self.metric in measured and ctx.epoch != self._asked_in:
            self._take(float(measured[self.metric]))
            self._asked_in = ctx.epoch
        if self.waited < self.patience:
            return StopAnswer(False)
        best = "never had a finite value" if self.best is None else f"did not get better than {self.best:g}"
        return StopAnswer(True, f"{self.metric} {best} for {self.waited} epochs that logged it")

    @property
    def settings(self) -> dict[str, Any]:
        """What its verdict is saved with."""
        return {"mode": self.mode, "patience": self.patience, "min_delta": self.min_delta}

    def holds(self, saved: Mapping[str, Any]) -> bool:
        """Whether a verdict by those settings is one by these: no more patience, and the same threshold."""
        return {**saved, "patience": self.patience} == self.settings and self.patience <= saved["patience"]

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain values."""
        return {
            "best": self.best, "waited": self.waited, "epoch": self._asked_in,
            "mode": self.mode, "min_delta": self.min_delta,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved memory; where better means something else now the waiting begins anew."""
        best = state["best"] if state.get("mode", self.mode) == self.mode else None
        self.best = None if best is None else float(best)
        same = best == state["best"] and state.get("min_delta", self.min_delta) == self.min_delta
        self.waited, self._asked_in = int(state["waited"]) if same else 0, int(state["epoch"])

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
    """Stop after `patience` measurements in a row in which `metric` did not get better.

    An epoch that logs nothing under the name has no measurement and is not counted; before the first one
    the run waits. Better is below (mode "min") or above ("max") the best so far by more than `min_delta`.
    `metric` is a name given to `ctx.log`. NaN and infinite values are no improvement and never the best; 0.0
    is a value like any other.
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
