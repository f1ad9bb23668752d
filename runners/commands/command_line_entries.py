"""What all verbs say alike of a committed epoch: where it stands, its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.log.live import Entry
from torchrelay.runners.commands.command_line_output import human_number


def entry_json(entry: Entry) -> dict[str, Any]:
    """The first keys of an epoch in every `--json`."""
    return {
        "epoch": entry.position.epoch,
        "step": entry.position.step,
        "branch": entry.branch,
        "try": entry.try_name,
    }


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`train/loss=0.1234 val/acc=0.9`."""
    return " ".join(f"{name}={human_number(value)}" for name, value in sorted(metrics.items()))
