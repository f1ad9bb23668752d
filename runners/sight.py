"""What can be seen of a run in one process now, and the line that says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torchrelay.records import dataclass
from torchrelay.runners.pace import duration, per_second

_METRICS = 8
"""So many are in a line; a tracker has them all."""


@dataclass(frozen=True)
class Sight:
    """`step` of `steps` in `epoch` of `last_epoch`, as far as that is known; a job may count no steps at all.

    `metrics` are reduced ones of the epoch before, or, of what this rank has logged in the running epoch,
    its own. `ckpt` tells of the newest save, `doing` of work that takes long, `done` that the epoch is over.
    """

    epoch: int = 0
    last_epoch: int | None = None
    step: int = 0
    steps: int | None = None
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_sec: float | None = None
    eta_secs: float | None = None
    ckpt: str = ""
    doing: str = ""
    done: bool = False

    @property
    def unit(self) -> str:
        """What is counted."""
        return "steps" if self.total_steps else "epochs"

    @property
    def where(self) -> str:
        """`epoch 3 step 1200/3900`."""
        words = [f"epoch {self.epoch}"]
        if self.total_steps:
            words.append(f"step {self.step}" + (f"/{self.steps}" if self.steps is not None else ""))
        elif self.last_epoch is not None:
            words[0] += f"/{self.last_epoch}"
        return " ".join([*words, "done"] if self.done else words)

    @property
    def values(self) -> str:
        """`train/loss 0.1234 val/acc 0.9`."""
        return " ".join(self._pairs)

    def values_within(self, room: int) -> str:
        """As many of them as fit into so many columns, each whole."""
        shown = ""
        for pair in self._pairs:
            longer = f"{shown} {pair}".lstrip()
            if len(longer) > room:
                break
            shown = longer
        return shown

    @property
    def _pairs(self) -> list[str]:
        shown = sorted(self.metrics.items())
        return [f"{name} {value:.4g}" for name, value in shown[:_METRICS]] + ["..."] * bool(shown[_METRICS:])

    @property
    def line(self) -> str:
        """All of it, in one line without its time."""
        parts = [self.where, self.values]
        parts += [per_second(self.per_sec, self.unit)] if self.per_sec is not None else []
        parts += [self.ckpt, self.doing]
        parts += [f"eta {duration(self.eta_secs)}"] if self.eta_secs is not None else []
        return " | ".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """As `live.json` has it; what JSON has no number for is text."""
        metrics = {n: v if math.isfinite(v) else str(v) for n, v in self.metrics.items()}
        return {**vars(self), "metrics": metrics, "unit": self.unit}
