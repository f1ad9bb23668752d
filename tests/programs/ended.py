"""Run by torchrun on 2 ranks: a run trains, is started again with new objects, and loads its best epoch.

ended.py <folder>    writes <folder>/rank<r>.json: what this rank's objects held, by case
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.runners.training.exit import run_and_leave

VALUES = {1: 0.1, 2: 0.9, 3: 0.3}


class Start:
    """One start of the program: a module that `setup` wraps, its optimizer, and a value of each rank."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.model = torch.nn.Linear(3, 1)
        self.ran: list[str] = []
        self.own = torch.zeros(1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.job = Job("ended", blobs=dict(model=self.model, optimizer=self.optimizer))
        self.job.blobs.add(own=self.own, scope="rank", reshard="drop")
        self.job.setup(self.wrap)
        self.job.epoch(self.train)
        self.job.exit(lambda: self.ran.append("exit"))
        self.job.stop_when(max_epochs(3))
        self.runner = JobRunner(self.job, where, best=("val/acc", "max"), code=False)

    def wrap(self) -> None:
        self.ran.append("setup")
        self.wrapped = torchrelay.data_parallel(self.model)

    def train(self, ctx: Any) -> None:
        self.ran.append(f"epoch {ctx.epoch}")
        self.optimizer.zero_grad()
        self.wrapped(torch.full((2, 3), 1.0 + ctx.rank)).sum().backward()
        self.optimizer.step()
        self.own.add_(ctx.rank + 1)
        ctx.log("val/acc", VALUES[ctx.epoch])

    def told(self) -> dict[str, Any]:
        steps = [int(state["step"]) for state in self.optimizer.state_dict()["state"].values()]
        return {"weight": self.model.weight.tolist(), "steps": steps, "own": self.own.item(), "ran": self.ran}


def main() -> None:
    session, folder = torchrelay.init(seed=1), Path(sys.argv[1])
    seen: dict[str, Any] = {}
    first = Start(folder / "run")
    first.runner.train()
    seen["first"] = first.told()
    torchrelay.seed(2)
    again = Start(folder / "run")
    seen["built"] = again.model.weight.tolist()
    seen["status"] = again.runner.train().status
    seen["again"] = again.told()
    seen["best"] = [again.runner.load_best(), again.told()]
    (folder / f"rank{session.env.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    run_and_leave(main)
