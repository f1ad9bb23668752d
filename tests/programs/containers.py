"""Run by torchrun: trains with live containers and generators, one run after another.

    containers.py RUNS        RUNS is JSON: [[run directory, epochs], ...]

Each rank writes what it held and drew to <run directory>.<epochs>.rank-<n>.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.runners.training.exit import run_and_leave


def run(session: Any, directory: Path, epochs: int) -> dict[str, Any]:
    """Train until so many epochs are over; what this rank held and drew, and what was said."""
    rank = session.env.rank
    ema, history, mine = {"w": torch.zeros(4)}, [], {"seen": []}
    own, common = np.random.default_rng(10 + rank), torch.Generator().manual_seed(5)
    blobs = dict(ema=ema, history=history, own=own, common=common)
    job = Job("containers", blobs=blobs)
    job.blobs(mine=mine, reshard="by_rank")
    drawn: list[Any] = []

    @job.epoch
    def train(ctx: Any) -> None:
        ema["w"].mul_(0.5)  # in place, while an asynchronous save may write the epoch before
        history.append(ctx.epoch)
        mine["seen"].append([ctx.epoch, rank])
        drawn.append([own.random(), torch.rand(1, generator=common).item()])
        ema["w"] = ema["w"] + drawn[-1][1]
        ema[f"only{ctx.epoch}"] = torch.full((2,), float(ctx.epoch))
        ema.pop(f"only{ctx.epoch - 1}", None)

    job.stop_when(max_epochs(epochs))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        JobRunner(job, directory, best=None, asynchronous=True).train(session)
    held = {"ema": {name: one.tolist() for name, one in ema.items()}, "history": history, "mine": mine}
    return {**held, "drawn": drawn, "said": [str(one.message) for one in caught]}


def main() -> None:
    """Run what the command line asks for."""
    session = torchrelay.init()
    for directory, epochs in json.loads(sys.argv[1]):
        told = run(session, Path(directory), epochs)
        place = Path(f"{directory}.{epochs}.rank-{session.env.rank}.json")
        place.write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
