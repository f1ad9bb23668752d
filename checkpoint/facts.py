"""What a manifest remembers of the run beside its blobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torchrelay.checkpoint.selection import EVERYTHING, Selection
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Facts:
    """Facts about a position: reduced metrics, the verdict of each stop condition, counters.

    `metrics` are those that the epoch logged; an epoch of an earlier version has the carried ones among them.
    `stop` maps a condition's name to {"stop": bool, "reason": str}; `elapsed_secs` and
    `total_steps` count over all attempts; `seed` is what `torchrelay.seed` was given, if anything.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)
    """The last values of metrics that earlier epochs logged and this one did not."""
    stop: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    total_steps: int = 0
    elapsed_secs: float = 0.0
    seed: int | None = None
    run_id: str | None = None
    over: bool = False
    """Whether the loop ended here, by the verdicts as they were combined."""
    selection: Selection = EVERYTHING
    """Which leaves the save took; the others are not in the epoch."""
    made_by_init: tuple[str, ...] | None = None
    """The blobs that nobody registered: `init` made them, and a load makes them anew. None: not known."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """What the program gave of what a resume may take from it, by name (`from_program`)."""
    places: Mapping[str, Any] = field(default_factory=dict)
    """Of a position with a step: where in its tasks each node was, and what it had logged."""

    @property
    def last_metrics(self) -> dict[str, float]:
        """The last value of every metric that the run has logged."""
        return {**self.carried, **self.metrics}
