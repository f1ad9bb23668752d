"""Run by torchrun on 2 ranks, with all warnings made errors: what one rank meets alone.

one_rank_warns.py <folder>    writes <folder>/rank<r>.json: by case, how the run ended here
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, max_epochs
from torchrelay.runners.training.exit import run_and_leave


class Counter:
    """An object of the program whose state one rank cannot tell at its second epoch."""

    def __init__(self, broken: bool) -> None:
        self.count, self.broken = 0, broken

    def state_dict(self) -> dict[str, Any]:
        if self.broken and self.count == 2:
            raise ValueError("the state is elsewhere")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def warned(session: Any, folder: Path) -> list[Any]:
    """Differences, late names and patterns without a leaf: rank 0 or rank 1 alone warns of each."""
    job = Job("warned", blobs=dict(weights=torch.zeros(4)))

    @job.init
    def begin(ctx: Any) -> None:
        ctx.workspace["noted"] = 0

    @job.epoch
    def train(ctx: Any) -> None:
        ctx.workspace["noted"] = ctx.rank + ctx.epoch
        if ctx.rank == 1:
            session.workspace()["late"] = ctx.epoch

    job.stop_when(max_epochs(2))
    manager = MultiNodeCheckpointManager(folder / "warned", exclude=["nothing.*"])
    result = JobRunner(job, manager).train(session)
    return [result.status, list(manager.engine.ledger.view().epochs())]


def broken(session: Any, folder: Path, asynchronous: bool) -> list[Any]:
    """A `state_dict` that raises on rank 1."""
    counter = Counter(session.env.rank == 1)
    job = Job("broken", blobs=dict(weights=torch.zeros(4)))
    job.blobs(counter=counter, scope="rank")

    @job.epoch
    def train(ctx: Any) -> None:
        counter.count += 1

    job.stop_when(max_epochs(3))
    manager = MultiNodeCheckpointManager(folder / f"broken-{asynchronous}", asynchronous=asynchronous)
    result = JobRunner(job, manager).train(session)
    return [result.status, list(manager.engine.ledger.view().epochs())]


def main() -> None:
    """All cases, one after another."""
    session, folder = torchrelay.init(seed=0), Path(sys.argv[1])
    warnings.simplefilter("error", UserWarning)
    told = {
        "warned": warned(session, folder),
        "broken": broken(session, folder, False),
        "broken behind": broken(session, folder, True),
    }
    (folder / f"rank{session.env.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
