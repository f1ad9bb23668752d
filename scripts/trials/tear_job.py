"""A job whose state changes in every way that a copy behind the training could tear.

A fused optimizer writes parameters without moving their versions, batch norm writes its buffers in
forward, an average is written by hand after each step. What an epoch must hold is cloned at its end,
in the task, by plain torch; `torn` compares it with what the verifying reader finds on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay import Context, Job, JobRunner, data_parallel, max_epochs, open_checkpoint

STEPS = 2
Truth = dict[int, dict[str, torch.Tensor]]
"""By epoch: leaf name to content."""


class Trainee:
    """Model, average and optimizer, built from a seed."""

    def __init__(self, seed: int, width: int = 512) -> None:
        torchrelay.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.Linear(width, 4),
        )
        self.trained = data_parallel(self.model)
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def blobs(self) -> dict[str, Any]:
        """What is registered."""
        return {"model": self.model, "average": self.average, "optimizer": self.optimizer}

    def step(self) -> None:
        """One step on data of the random streams."""
        self.optimizer.zero_grad()
        self.trained(torch.rand(8, 16)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(own, 0.5)

    def content(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors under their leaf names."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.state.model.{name}.{key}"] = value
        return {name: value.detach().clone() for name, value in found.items()}


def train(
    run_dir: Path,
    epochs: int,
    *,
    seed: int = 3,
    before_step: Callable[[Context, Trainee], None] = lambda ctx, trainee: None,
    after_step: Callable[[Context, Trainee], None] = lambda ctx, trainee: None,
    resume_from_epoch: int | None = None,
    trainee: Trainee | None = None,
    **options: Any,
) -> Truth:
    """Train with these options of JobRunner; returns what the epochs that ran must hold."""
    trainee = trainee or Trainee(seed)
    truth: Truth = {}
    job = Job("tear", blobs=trainee.blobs())

    @job.epoch
    def learn(ctx: Context) -> None:
        for _ in range(STEPS):
            before_step(ctx, trainee)
            trainee.step()
            after_step(ctx, trainee)
        truth[ctx.epoch] = trainee.content()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run_dir, **options).train(resume_from_epoch=resume_from_epoch)
    return truth


def torn(run_dir: Path, epoch: int, expected: dict[str, torch.Tensor]) -> list[str]:
    """The leaves of a committed epoch that are not what they must be."""
    found = open_checkpoint(run_dir, epoch=epoch).load_tensors("*")
    return [
        name
        for name, value in expected.items()
        if name not in found or not torch.equal(found[name].reshape(value.shape), value)
    ]
