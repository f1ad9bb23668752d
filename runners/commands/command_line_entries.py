"""What all verbs say alike of a committed epoch: where it stands, its metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry, Key
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
