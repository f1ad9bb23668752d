"""An object whose state holds the model's weight on rank 0, and a copy of it on the others.

shared_state.py <folder>    trains whole, and cut and resumed; <folder>/rank<r>.json has both digests
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, data_parallel, max_epochs


class Best:
    """Keeps a weight."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3, 3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def train(run: Path, epochs: int, session: Any) -> tuple[str, bool]:
    """The digest of the model and the best weight, and whether they are one tensor."""
    torchrelay.seed(0)
    model, best = nn.Linear(3, 3), Best()
    trained = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job("shared", blobs={"best": best, "model": model, "optimizer": optimizer})

    @job.epoch
    def epoch(ctx: Any) -> None:
        loss = trained(torch.ones(2, 3) * (1 + ctx.rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ctx.epoch == 1:
            best.weight = model.weight if ctx.rank == 0 else model.weight.detach().clone()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None, code=False).train(session)
    parts = [*model.parameters(), best.weight]
    data = b"".join(one.detach().numpy().tobytes() for one in parts)
    return hashlib.sha256(data).hexdigest(), best.weight is model.weight


def main(folder: Path) -> None:
    """Both runs, in one process."""
    session = torchrelay.init()
    whole = train(folder / "whole", 3, session)
    train(folder / "cut", 1, session)
    told = [whole, train(folder / "cut", 3, session)]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
