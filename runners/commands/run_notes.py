"""What lines of metrics say: of one epoch, and which epoch is best. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an epoch's line; what is no number is left out, `nan` as text is a number."""
    found = line.get("metrics")
    if not isinstance(found, dict):
        return {}
    values = ((name, _number(value)) for name, value in found.items())
    return {name: value for name, value in values if value is not None}


def best_of(lines: Sequence[Mapping[str, Any]], best: tuple[str, str]) -> tuple[float, int] | None:
    """The best value of a metric and the epoch it was first reached in; 0.0 is one, `inf` is none."""
    name, mode = best
    sign = -1.0 if mode == "max" else 1.0
    scored = [(metrics_of(line).get(name, math.nan), line["epoch"]) for line in lines]
    known = [(sign * value, epoch) for value, epoch in scored if math.isfinite(value)]
    if not known:
        return None
    value, epoch = min(known)
    return sign * value, epoch


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(value.lower())
    return float(value) if type(value) in (int, float) else None
