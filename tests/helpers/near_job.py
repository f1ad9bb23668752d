"""A run with a near directory per host: `near_job.py RUN EPOCHS OPTIONS`; OPTIONS are JSON, NEAR the place.

With CONTROL an epoch begins when `go.<epoch>` is there, files are sent while `hold` is not, and each rank
leaves its pid in `pid.<rank>`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import Context, Job, JobRunner, Tier, max_epochs
from torchrelay.checkpoint.tiering.upload import TierUploader

CONTROL = Path(os.environ["CONTROL"]) if "CONTROL" in os.environ else None
WAIT_SECS = 120.0


def wait_for(present: bool, name: str) -> None:
    end = time.monotonic() + WAIT_SECS
    while CONTROL is not None and (CONTROL / name).exists() is not present:
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.01)


create = TierUploader._create


def held(self: TierUploader, path: str, write: Any) -> None:
    wait_for(False, "hold")
    create(self, path, write)


def near_job(epochs: int) -> Job:
    torchrelay.seed(0)
    model = torch.nn.Linear(600, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("near", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def train(ctx: Context) -> None:
        wait_for(True, f"go.{ctx.epoch}")
        torch.manual_seed(ctx.epoch)
        loss = model(torch.randn(4, 600)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"trained {ctx.epoch}")

    job.stop_when(max_epochs(epochs))
    return job


if __name__ == "__main__":
    if CONTROL is not None:
        TierUploader._create = held  # type: ignore[method-assign]
        (CONTROL / f"pid.{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    options = json.loads(sys.argv[3])
    tier = Tier(os.environ["NEAR"], **options.pop("tier", {})) if "NEAR" in os.environ else None
    runner = JobRunner(near_job(int(sys.argv[2])), sys.argv[1], tier=tier, code=False, **options)
    runner.main([])
