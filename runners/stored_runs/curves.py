"""The metrics of epochs that the log has and the run's files lack, made again from the checkpoints.

A process that is lost between a commit and the next pass of putting takes the newest lines with it. What was
measured stands in the manifests too, so a start on another host writes these lines again, into the file of
its own generation, before it adds to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.summary import glance
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.journal import finite

MOST_EPOCHS = 200


def missing_epochs(told: Sequence[int], committed: Sequence[int], upto: int) -> list[int]:
    """Epochs up to `upto` that are committed behind the last one that is told of, oldest first. Pure."""
    last = max((one for one in told if one <= upto), default=0)
    return [one for one in committed if last < one <= upto][-MOST_EPOCHS:]


def mend_curves(
    run: RunDirectory, view: LogView, storage: Storage, generation: int, upto: int, attempt: int
) -> list[int]:
    """Write the missing lines up to an epoch into the file of a generation; returns their epochs.

    What cannot be read stays missing.
    """
    entries = {one.position.epoch: one for one in view.line() if one.position.boundary and one.healthy}
    told = [line["epoch"] for line in run.metrics()]
    mended: list[int] = []
    for epoch in missing_epochs(told, sorted(entries), upto):
        try:
            facts = glance(storage, entries[epoch]).facts
        except OSError:
            continue
        line: dict[str, Any] = {
            "epoch": epoch,
            "step": facts.total_steps,
            "attempt": attempt,
            "time": round(time.time(), 3),
            "saved": True,
            "metrics": {name: finite(value) for name, value in facts.metrics.items()},
            "from_checkpoint": True,
        }
        run.log_metrics(generation, line)
        mended.append(epoch)
    return mended
