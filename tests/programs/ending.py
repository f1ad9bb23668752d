"""Run by torchrun: leaves in the middle of epochs and goes on, or trains slowly until somebody asks.

    ending.py exact FOLDER POINTS     POINTS is JSON: [[name, [[tick, ranks that get SIGTERM], ...]], ...]
    ending.py resized RUN TICK        one start, left at the TICK (0: not)
    ending.py slow RUN [options]      `main()` of a job whose steps take their time
    ending.py stuck RUN [options]     the same, and rank 0 hears of nothing from its fourth step on

In `exact` every point is a run of its own: a start per tick, which is left there, and one to the end (not of
the one that is called `left`), all in this process. Each rank writes what it saw to FOLDER/rank-<n>.json, or
to RUN.rank-<n>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ending_job import Start, start

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, data_parallel, max_epochs
from torchrelay.runners.session import stop_requests
from torchrelay.runners.training.exit import run_and_leave


def asking(tick: int, ranks: list[int]) -> Callable[[int, Context], None]:
    """At this tick these ranks get SIGTERM; the main thread runs their handlers before it goes on."""

    def at(now: int, ctx: Context) -> None:
        if now == tick and ctx.rank in ranks:
            os.kill(os.getpid(), signal.SIGTERM)

    return at


def told(one: Start) -> dict[str, Any]:
    return {**asdict(one), "status": one.result.status if one.result is not None else None}


def exact() -> None:
    """Play all points beside an undisturbed run."""
    stop_requests._announced = deque(maxlen=0)  # each run stands for a process of its own
    session = torchrelay.init()
    folder = Path(sys.argv[2])
    runs = {"whole": [start(session, folder / "whole")]}
    for name, points in json.loads(sys.argv[3]):
        runs[name] = [
            start(session, folder / name, asking(tick, ranks), seed=50 + number if number else 5)
            for number, (tick, ranks) in enumerate(points)
        ]
        if name != "left":
            runs[name].append(start(session, folder / name, seed=99))
    out = {name: [told(one) for one in starts] for name, starts in runs.items()}
    (folder / f"rank-{session.env.rank}.json").write_text(json.dumps(out))


def resized() -> None:
    """Train once, on whatever number of ranks this is."""
    session = torchrelay.init()
    run, tick = Path(sys.argv[2]), int(sys.argv[3])
    one = start(session, run, asking(tick, [session.peers.size - 1]))
    Path(f"{run}.rank-{session.env.rank}.json").write_text(json.dumps(told(one)))


def slow() -> None:
    """Train until somebody asks; says every step, and where it goes on."""
    session = torchrelay.init(seed=1)
    stuck = sys.argv[1] == "stuck" and session.env.rank == 0
    model = torch.nn.Linear(4, 1)
    trained = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = EpochLoader(torch.randn(4000, 4), batch_size=4)
    job = Job("slow", blobs={"model": model, "optimizer": optimizer, "loader": loader})

    @job.epoch
    def learn(ctx: Context) -> None:
        print(f"begins after step {ctx.step}", flush=True)
        for batch in ctx.steps(loader):
            (trained(batch[0]).mean() * batch.weight).backward()
            optimizer.step()
            print(f"did step {ctx.step}", flush=True)
            time.sleep(60 if stuck and ctx.step == 4 else 0.05)

    job.stop_when(max_epochs(2))
    JobRunner(job, sys.argv[2]).main(sys.argv[3:])


if __name__ == "__main__":
    if sys.argv[1] in ("slow", "stuck"):
        slow()
    run_and_leave({"exact": exact, "resized": resized}[sys.argv[1]])
