"""A job whose run lies in a store, each rank on a host of its own.

    stored_run.py URL WORKSPACES EPOCHS [RANK]

The rank is killed in epoch 3, behind its step.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs

url, workspaces, epochs, *killed = sys.argv[1:]
os.environ["TORCHRELAY_WORKSPACE"] = f"{workspaces}/{os.environ.get('RANK', '0')}"
torchrelay.seed(3)
session = torchrelay.init()
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job = Job("stored", blobs={"model": model, "optimizer": optimizer})


@job.epoch
def train(ctx: Context) -> None:
    """The same step on all ranks."""
    loss = model(torch.arange(8.0).reshape(2, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ctx.log("loss", loss)
    if ctx.epoch == 3 and str(ctx.rank) in killed:
        os.kill(os.getpid(), signal.SIGKILL)


job.stop_when(max_epochs(int(epochs)))
JobRunner(job, url, code=False, single_writer="external").main()
