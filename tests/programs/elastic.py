"""Run by two agents of one elastic torchrun job: trains until it is alone, and two epochs more.

elastic.py <run directory>
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs

torchrelay.init(seed=0)
model = torch.nn.Linear(4, 1)
trained = data_parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
loader = EpochLoader((x, x.sum(1, keepdim=True)), batch_size=8)
alone = torch.zeros(1)
job = Job("elastic", blobs=dict(model=model, optimizer=optimizer, loader=loader, alone=alone))


@job.epoch
def train(ctx: Any) -> None:
    """Eight slow steps."""
    for batch in ctx.steps(loader):
        inputs, targets = batch
        loss = (trained(inputs) - targets).square().mean()
        optimizer.zero_grad()
        (loss * batch.weight).backward()
        optimizer.step()
        time.sleep(0.05)
    alone.add_(ctx.world_size == 1)
    print(f"epoch {ctx.epoch} of {ctx.world_size}", flush=True)


job.stop_when(max_epochs(200))
job.stop_when(lambda ctx: bool(alone >= 2))
JobRunner(job, sys.argv[1], best=None).main()
