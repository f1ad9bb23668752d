"""The job that the kill storm strikes: four short epochs, with the epoch in every blob.

    python scripts/trials/storm_job.py RUN OUTSIDE

OUTSIDE gets `oracle`, the epochs that were acknowledged, and `starts`, the epoch an attempt began with:
what was acknowledged outside of the run directory, to be compared with the log after a kill.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, Scope, data_parallel, max_epochs
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.metadata.handlers import FileMetadataHandler

EPOCHS = 4
STEPS = 8
MARKS = 3


class Oracle(FileMetadataHandler):
    """The default handler, which also writes to a file outside of the run directory."""

    def __init__(self, directory: Path, outside: Path) -> None:
        super().__init__(directory)
        self.outside = outside

    def write(self, epoch: int) -> None:
        """Note what was acknowledged, durably."""
        super().write(epoch)
        append(self.outside / "oracle", epoch=epoch)


def append(path: Path, **line: int) -> None:
    """Append a line of JSON in one write and sync it."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, json.dumps(line).encode() + b"\n")
        os.fsync(handle)
    finally:
        os.close(handle)


def main(run: Path, outside: Path) -> None:
    """Train; run again after a kill it carries on."""
    torchrelay.init(seed=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4))
    trained = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(STEPS * 16, 32)
    loader = EpochLoader((x, x.sum(1).long() % 4), batch_size=16)
    job = Job("storm", blobs=dict(model=model, optimizer=optimizer, loader=loader))
    marks = {f"mark_{number}": torch.zeros(5000, dtype=torch.int64) for number in range(MARKS)}
    own = torch.zeros(500, dtype=torch.int64)
    job.blobs({**marks, "said": 0})
    job.blobs(own=own, scope=Scope.RANK)

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        if ctx.rank == 0 and not started:
            started.append(ctx.epoch)
            append(outside / "starts", pid=os.getpid(), epoch=ctx.epoch)
        for x, y in ctx.steps(loader):
            optimizer.zero_grad()
            F.cross_entropy(trained(x), y).backward()
            optimizer.step()

    @job.epoch
    def tell(ctx: torchrelay.Context) -> None:
        for tensor in (*marks.values(), own):
            tensor.fill_(ctx.epoch)
        own[0] = ctx.rank
        ctx.workspace.update(said=ctx.epoch)

    started: list[int] = []
    job.stop_when(max_epochs(EPOCHS))
    runner = JobRunner(job, run, max_attempts=0)  # kills at random moments may well meet one place often
    use_oracle(runner, run, outside)
    runner.main([])


def use_oracle(runner: JobRunner, run: Path, outside: Path) -> None:
    """Let the run's manager write to the oracle too."""
    manager = runner.manager
    if isinstance(manager, Manager):
        manager.metadata_handler = Oracle(run, outside)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
