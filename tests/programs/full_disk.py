"""Two ranks train while the disk is full for two epochs: saves at boundaries, then behind the training."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch
from in_flight import nothing_in_flight

import torchrelay
from torchrelay import Job, JobRunner, max_epochs

disk = Path(sys.argv[1])
session = torchrelay.init(seed=1)
FIRST = session.peers.rank == 0


def train(name: str, **options: bool) -> None:
    torch.manual_seed(1)
    job = Job("full", blobs={"w": torch.zeros(100_000), "model": torch.nn.Linear(50, 1000)})
    filler = disk / "filler"

    @job.epoch
    def fill(ctx: torchrelay.Context) -> None:
        ctx["w"] += 1
        nothing_in_flight()
        if ctx.epoch == 2 and FIRST:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1024))
        if ctx.epoch == 4 and FIRST:
            filler.unlink()

    job.stop_when(max_epochs(5))
    result = JobRunner(job, disk / name, reuse=False, **options).train(session)
    assert (result, result.committed) == (5, 5), result
    if FIRST:
        names = sorted(path.name for path in (disk / name / "checkpoints/data").iterdir())
        print("saved", *(int(one[1:9]) for one in names))


train("sync")
train("async", asynchronous=True)
