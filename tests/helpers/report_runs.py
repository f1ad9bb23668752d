"""Small runs that reports are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.metadata.code.capture import write_capture
from torchrelay.metadata.run_directory import RunDirectory


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


def noted(
    path: Path,
    values: Mapping[str, Sequence[float]],
    *,
    steps: int | None = 16,
    params: Sequence[Mapping[str, Any]] = (),
    argv: Sequence[str] = ("train.py",),
) -> RunDirectory:
    """The notes of a run without checkpoints: a value of each metric per epoch, `steps` steps in each.

    `params` are those of its starts. With steps, each metric is also logged within epochs, twice.
    """
    run = RunDirectory(path)
    run.create("noted", ("val/acc", "max"), 1)
    length = max(map(len, values.values()))
    for epoch in range(1, length + 1):
        found = {name: _json(said[epoch - 1]) for name, said in values.items() if epoch <= len(said)}
        line = {"epoch": epoch, "time": 1e9 + epoch, "saved": True, "metrics": found}
        run.log_metrics(0, line if steps is None else {**line, "step": epoch * steps})
        if steps is not None:
            within = [epoch * steps - steps // 2, epoch * steps]
            run.log_steps(0, [{"epoch": epoch, "step": step, "metrics": found} for step in within])
    for attempt, one in enumerate(params):
        write_capture(path, attempt, {"argv": list(argv), "params": dict(one), "host": "h1"})
    if not params:
        write_capture(path, 0, {"argv": list(argv), "host": "h1"})
    run.write_status("FINISHED", epoch=length, generation=0)
    return run


def _json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
