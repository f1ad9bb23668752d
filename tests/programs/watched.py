"""A short job that a person watches: two epochs of slow steps; a warning and words on every rank.

watched.py RUN STEPS SECS_PER_STEP [KILL_AT_EPOCH]
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import torch

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, max_epochs

RUN, STEPS, SECS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
KILL = int(sys.argv[4]) if len(sys.argv) > 4 else 0

session = torchrelay.init(seed=0)
world = int(os.environ.get("WORLD_SIZE", "1"))
loader = EpochLoader((torch.arange(STEPS * world),), batch_size=world)
job = Job("watched", blobs=dict(model=torch.nn.Linear(2, 2), loader=loader))


@job.epoch
def train(ctx):
    for _ in ctx.steps(loader):
        time.sleep(SECS)
        ctx.log("train/loss", 1.0 / ctx.epoch)
    if ctx.epoch == 1:
        warnings.warn(f"odd data on rank {ctx.rank}", stacklevel=1)
        print(f"words of rank {ctx.rank}", flush=True)
    if ctx.epoch == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


job.stop_when(max_epochs(2 if not KILL else 9))
JobRunner(job, RUN, trackers=["csv", "jsonl"]).main()
