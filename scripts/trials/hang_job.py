"""The job that the hang hunt strikes: at one phase of one epoch one rank waits until the fault has been made.

    python scripts/trials/hang_job.py RUN OUTSIDE

OUTSIDE/plan.json says `phase`, `rank`, `epoch` and `hold_secs`, how long that rank then keeps Python's lock.
The rank makes OUTSIDE/at and waits for OUTSIDE/go. OUTSIDE/oracle gets the epochs that were acknowledged.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from storm_job import use_oracle

import torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.runners.distributed.agreement import StorePeers

EPOCHS = 3
STEPS = 5
PHASES = ("collective", "barrier", "save", "commit")
_WAIT_SECS = 60.0


class Trap:
    """Waits once, at the planned phase on the planned rank."""

    def __init__(self, outside: Path, rank: int) -> None:
        plan = json.loads((outside / "plan.json").read_text())
        self.outside = outside
        self.phase = plan["phase"] if plan["rank"] == rank else None
        self.epoch = plan["epoch"]
        self.hold_secs = plan["hold_secs"]
        self.now = 0

    def at(self, phase: str) -> None:
        """Report that the phase is reached; continue on the answer, or without one."""
        if phase != self.phase or self.now != self.epoch:
            return
        self.phase = None
        (self.outside / "at").touch()
        end = time.monotonic() + _WAIT_SECS
        while not (self.outside / "go").exists() and time.monotonic() < end:
            time.sleep(0.005)
        if self.hold_secs:
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(self.hold_secs * 1e6)))


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the same arguments before a method."""
    method = getattr(owner, name)

    def both(*arguments: Any, **named: Any) -> Any:
        act(*arguments)
        return method(*arguments, **named)

    setattr(owner, name, both)


def main(run: Path, outside: Path) -> None:
    """Train small epochs; run again it carries on."""
    rank = torchrelay.init(seed=1).env.rank
    trap = Trap(outside, rank)
    before(StorePeers, "exchange", lambda _, topic, *__: topic == "group epoch" and trap.at("barrier"))
    before(LocalWriteHandle, "write_at", lambda file, *_: "/data/" in file.path and trap.at("save"))
    before(LocalStorage, "link_exclusive", lambda _, path, __: path.startswith("log/") and trap.at("commit"))
    weights = torch.zeros(1 << 16)
    job = Job("hang", blobs=dict(weights=weights, own=torch.zeros(1 << 16)))

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        trap.now = ctx.epoch
        for step in range(STEPS):
            if step == 2:
                trap.at("collective")
            dist.all_reduce(one := torch.ones(1))
            weights.add_(one)

    job.stop_when(max_epochs(EPOCHS))
    runner = JobRunner(job, run)
    use_oracle(runner, run, outside)
    runner.main([])


if __name__ == "__main__":
    print(f"pid {os.getpid()}", flush=True)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
