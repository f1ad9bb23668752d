"""The job of the soak: epochs of one step, the last three kept; says from time to time what it holds.

python scripts/trials/soak_job.py RUN OUTSIDE EPOCHS [--asynchronous]
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from storm_job import append, use_oracle
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, max_epochs

EVERY = 20
"""Epochs between two measurements."""
KEPT = 3


def measured(run: Path) -> dict[str, int]:
    """What the process holds, and its run directory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "pid": os.getpid(),
        "rss": pages * resource.getpagesize(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "disk": sum(_sizes(run / "checkpoints/data")),
        "tries": len(list((run / "checkpoints/data").iterdir())),
        "slots": len(list((run / "checkpoints/log").iterdir())),
    }


def _sizes(folder: Path) -> Iterator[int]:
    """Of the files of tries; one that is being deleted meanwhile is left out."""
    for parent, _, names in os.walk(folder):  # unlike rglob it passes over folders that go meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                yield (Path(parent) / name).stat().st_size


def main(run: Path, outside: Path, epochs: int, *, asynchronous: bool) -> None:
    """Train; run again after a kill it carries on."""
    torchrelay.seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job("soak", blobs=dict(model=model, optimizer=optimizer))

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        optimizer.zero_grad()
        model(torch.rand(8, 64)).square().mean().backward()
        optimizer.step()
        if ctx.epoch % EVERY == 0:
            append(outside / "measured", epoch=ctx.epoch, **measured(run))

    job.stop_when(max_epochs(epochs))
    runner = JobRunner(job, run, keep_last=KEPT, max_attempts=0, asynchronous=asynchronous)
    use_oracle(runner, run, outside)
    runner.main([])


def read(outside: Path) -> list[dict[str, int]]:
    """All measurements."""
    path = outside / "measured"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), asynchronous="--asynchronous" in sys.argv)
