"""What a manifest remembers of the run beside its blobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrelay.checkpoint.selection import EVERYTHING, Selection


@dataclass(frozen=True)
class Facts:
    """Facts about a position: reduced metrics, the verdict of each stop condition, counters.

    `stop` maps a condition's name to {"stop": bool, "reason": str}; `elapsed_secs` and
    `total_steps` count over all attempts; `seed` is what `torchrelay.seed` was given, if anything.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    stop: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    total_steps: int = 0
    elapsed_secs: float = 0.0
    seed: int | None = None
    run_id: str | None = None
    over: bool = False
    """Whether the loop ended here, by the verdicts as they were combined."""
    selection: Selection = EVERYTHING
    """Which leaves the save took; the others are not in the epoch."""
    places: Mapping[str, Any] = field(default_factory=dict)
    """Of a position with a step: where in its tasks each node was, and what it had logged."""
