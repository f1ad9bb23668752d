"""A job whose state changes in every way that a background copy could tear.

A fused optimizer writes parameters without moving their versions, batch norm writes its buffers in
forward, an average is written by hand after each step. Sparse writers change some rows of large weights
in forward, before the optimizer steps. What an epoch must hold is cloned at its end, in the task, by
plain torch; `torn` compares it with what the verifying reader finds on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay import Context, Job, JobRunner, data_parallel, max_epochs, open_checkpoint
from torchrelay.errors import UnknownEpochError

STEPS = 2
Truth = dict[int, dict[str, torch.Tensor]]
"""By epoch: leaf name to content."""


class SparseWriters(nn.Module):
    """A table of which torch normalises some rows in forward, and one whose rows are written by hand."""

    ROWS, PLACES = 4096, 16

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.normed = nn.Embedding(self.ROWS, 32, max_norm=1.0)
        self.cache = nn.Parameter(torch.rand(self.ROWS, 32)) if by_hand else None

    def forward(self) -> torch.Tensor:
        """A number that depends on all rows that were looked up."""
        places = torch.randint(self.ROWS // 8, self.ROWS // 4, (self.PLACES,))  # between the samples
        found = self.normed(places).square().sum()
        if self.cache is not None:
            with torch.no_grad():
                self.cache.index_copy_(0, places, torch.rand(self.PLACES, 32))
            found = found + self.cache[places].square().sum()
        return found


class Trainee:
    """Model, average and optimizer, built from a seed; `sparse` adds the sparse writers to the model."""

    def __init__(self, seed: int, width: int = 512, *, sparse: SparseWriters | None = None) -> None:
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
        self.sparse = sparse
        parameters = [*self.model.parameters(), *(sparse.parameters() if sparse is not None else ())]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def blobs(self) -> dict[str, Any]:
        """What is registered."""
        found = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return found if self.sparse is None else {**found, "sparse": self.sparse}

    def step(self) -> None:
        """One step on data of the random streams."""
        self.optimizer.zero_grad()
        loss = self.trained(torch.rand(8, 16)).square().mean()
        if self.sparse is not None:
            loss = loss + self.sparse()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 0.5)

    def content(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors under their leaf names."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        parts: dict[str, nn.Module] = {"model": self.model}
        if self.sparse is not None:
            parts["sparse"] = self.sparse
            found |= {f"sparse.{name}": value for name, value in self.sparse.state_dict().items()}
        for blob, part in parts.items():
            for name, parameter in part.named_parameters():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    found[f"optimizer.state.{blob}.{name}.{key}"] = value
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


def committed(run_dir: Path, truth: Truth) -> Truth:
    """What the epochs that were saved must hold; a save that saw a foreign write commits nothing."""
    found = {}
    for epoch, expected in truth.items():
        with suppress(UnknownEpochError):
            open_checkpoint(run_dir, epoch=epoch)
            found[epoch] = expected
    return found


def torn(run_dir: Path, epoch: int, expected: dict[str, torch.Tensor]) -> list[str]:
    """The leaves of a committed epoch that are not what they must be."""
    found = open_checkpoint(run_dir, epoch=epoch).load_tensors("*")
    return [
        name
        for name, value in expected.items()
        if name not in found or not torch.equal(found[name].reshape(value.shape), value)
    ]
