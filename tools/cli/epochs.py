"""What all verbs say alike of an epoch: where it stands, its marks and metrics, which one is best."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.position import Entry, Key
from torchrelay.checkpoint.log.view import LogView
from torchrelay.runners.monitoring.console import human_number


def entry_json(entry: Entry) -> dict[str, Any]:
    """The first keys of an epoch in every `--json`."""
    return {
        "epoch": entry.position.epoch,
        "step": entry.position.step,
        "branch": entry.branch,
        "try": entry.try_name,
    }


def states_of(entry: Entry, current: Collection[Key]) -> list[str]:
    """What keeps an epoch from being used, in words; `current` are the keys that the branch of now sees."""
    states = [] if entry.key in current else ["abandoned"]
    states += [] if entry.healthy else ["quarantined"]
    return states + ([] if entry.resumable else ["not resumable"])


def current_keys(view: LogView) -> frozenset[Key]:
    """The keys of the epochs that the current branch sees."""
    return frozenset(one.key for one in view.line())


def marks_of(view: LogView, entry: Entry) -> list[str]:
    """The tags and pins of an epoch, `tag:paper`."""
    return [f"{mark.kind}:{mark.name}" for mark in view.marks if mark.target == entry.key]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`train/loss=0.1234 val/acc=0.9`."""
    return " ".join(f"{name}={human_number(value)}" for name, value in sorted(metrics.items()))


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
