"""Trains the accuracies that it is told, an epoch each, and keeps what it is told.

kept_job.py RUN ACCURACIES SECONDS OPTIONS     ACCURACIES and OPTIONS are JSON, SECONDS what an epoch takes
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchrelay import Context, Job, JobRunner, max_epochs


def kept_job(accuracies: list[float | None], seconds: float = 0.0) -> Job:
    """A job of so many epochs; None logs no accuracy."""
    job = Job("kept", blobs={"weights": torch.zeros(4)})

    @job.epoch
    def work(ctx: Context) -> None:
        ctx["weights"] += 1
        time.sleep(seconds)
        ctx.log("loss", 1.0)
        accuracy = accuracies[ctx.epoch - 1]
        if accuracy is not None:
            ctx.log("val/acc", accuracy)

    job.stop_when(max_epochs(len(accuracies)))
    return job


def train(run: Path, accuracies: list[float | None], **how: Any) -> int:
    """Train to the end of the list; returns the last epoch."""
    start = {"resume_from_epoch": how.pop("resume_from_epoch", None)}
    return JobRunner(kept_job(accuracies), run, **how).train(**start)


if __name__ == "__main__":
    options = json.loads(sys.argv[4])
    JobRunner(kept_job(json.loads(sys.argv[2]), float(sys.argv[3])), sys.argv[1], **options).main([])
