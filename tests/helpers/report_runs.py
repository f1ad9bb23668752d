"""A small run that reports are made of."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs


def train(
    run: Path, epochs: int, *, fails_in: int | None = None, step: float = 0.1, **options: object
) -> int:
    """One start: a small linear model; `frozen` is a blob that never changes, so later epochs refer to it."""
    torch.manual_seed(0)
    model, frozen = torch.nn.Linear(64, 64), torch.nn.Linear(256, 64)
    job = Job("report", blobs=dict(model=model, frozen=frozen))

    @job.epoch
    def go(ctx) -> None:
        if ctx.epoch == fails_in:
            raise RuntimeError("the lights went out")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - step)
        ctx.log("train/loss", 1 / ctx.epoch + step)
        ctx.log("val/acc", 1 - 1 / (1 + ctx.epoch) - step)
        if ctx.epoch == 5 and step == 0.2:
            ctx.log("train/odd", float("nan"))

    job.stop_when(max_epochs(epochs))
    return int(JobRunner(job, run, best=("val/acc", "max"), **options).train(LocalSession()))
