"""Small runs that are built on each other, for tests of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay import Job, JobRunner, LocalSession, RunResult, max_epochs


class Net(nn.Module):
    """An encoder and a head, linear so that tests can tell what became of each weight."""

    def __init__(self, out: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.head = nn.Linear(3, out)


def filled(module: nn.Module, value: float) -> nn.Module:
    """The module with one number everywhere."""
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(value)
    return module


def run_stage(
    where: Path,
    blobs: dict[str, Any],
    *,
    epochs: int = 2,
    step: float = 1.0,
    crash_in: int | None = None,
    **options: Any,
) -> RunResult:
    """Train a run whose epochs add `step` to each trainable parameter; epoch `crash_in` raises."""
    job = Job("stage", blobs=blobs)

    @job.epoch
    def train(ctx: Any) -> None:
        if ctx.epoch == crash_in:
            raise RuntimeError("crash as planned")
        with torch.no_grad():
            for name in blobs:
                one = ctx[name]
                for parameter in one.parameters() if isinstance(one, nn.Module) else ():
                    if parameter.requires_grad:
                        parameter += step
        ctx.log("val/acc", float(ctx.epoch))

    job.stop_when(max_epochs(epochs))
    return JobRunner(job, where, **options).train(LocalSession())


def values(where: Path, pattern: str = "*", epoch: int | str = "last") -> dict[str, float]:
    """The first number of each stored tensor."""
    from torchrelay import open_checkpoint

    found = open_checkpoint(where, epoch=epoch).load_tensors(pattern)
    return {name: one.flatten()[0].item() for name, one in found.items() if not name.startswith("rng.")}
