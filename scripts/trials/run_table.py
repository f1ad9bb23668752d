"""The epochs of a run as rows of a table: what they brought, what saving cost, how the launch began."""

from __future__ import annotations

import json
from pathlib import Path

import torchrelay
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.metadata.run_directory import RunDirectory

COLUMNS = ("run", "epoch", "loss", "test accuracy", "save secs", "resumed")


def rows_of(run: Path, name: str, how: str, since: int) -> list[list[str]]:
    """A row for each epoch from `since` on that the newest launch of a run has trained."""
    metrics = RunDirectory(run).metrics()
    rows = []
    for line in metrics:
        if line["epoch"] < since:
            continue
        checkpoint = torchrelay.open_checkpoint(run, epoch=line["epoch"])
        rows.append(
            [
                name,
                str(line["epoch"]),
                f"{line['metrics']['train/loss']:.4f}",
                f"{line['metrics']['test/acc']:.2%}",
                f"{save_secs(run, checkpoint):.3f}",
                how or "no",
            ]
        )
    return rows


def save_secs(run: Path, checkpoint: Checkpoint) -> float:
    """How long the slowest node needed to save an epoch, all phases together."""
    path = run / "checkpoints" / "data" / checkpoint.entry.attempt_name / "stats.json"
    nodes = json.loads(path.read_text())["nodes"]
    return max(float(sum(node["secs"].values())) for node in nodes)
