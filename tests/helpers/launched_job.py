"""What the tests of `torchrelay launch` start: two epochs of a small model, on any number of ranks.

`launched_job.py RUN WHAT`: what is done differently, once the run is in its first epoch, in the first attempt
of the launch only. `slow`, `slow1`: from then on steps take so many seconds, so that there is time to end it
from outside.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, data_parallel, max_epochs

run, what = Path(sys.argv[1]), sys.argv[2]
first = os.environ.get("TORCHRELAY_LAUNCH_ATTEMPT") == "0"
session = torchrelay.init(seed=0)
model = torch.nn.Linear(4, 1)
trained = data_parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = EpochLoader(torch.randn(800, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)
job = Job("launched", blobs=dict(model=model, optimizer=optimizer, loader=loader))


def strike(rank: int) -> None:
    if what == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fails" and rank == 1:
        raise ArithmeticError("made up by a test")
    if what.startswith("slow"):
        Path(f"{run}.here").touch()


@job.epoch
def train(ctx: Context) -> None:
    for batch in ctx.steps(loader):
        loss = (trained(batch[0]) ** 2).mean()
        optimizer.zero_grad()
        (loss * batch.weight).backward()
        optimizer.step()
        if first and ctx.step == 10:
            strike(ctx.rank)
        if first and ctx.step >= 10 and what.startswith("slow"):
            time.sleep(float(what.removeprefix("slow") or 0.2))


@job.exit
def done(ctx: Context) -> None:
    print(f"rank {ctx.rank} of {ctx.world_size} is done")


job.stop_when(max_epochs(2))
JobRunner(job, run).main([])
