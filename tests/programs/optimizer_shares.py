"""Moments that a dict holds, too: on all ranks, on rank 0 alone, or on rank 0 while the others hold a copy.

optimizer_shares.py <folder> <which> <epochs>    trains in <folder>/run; <folder>/rank<r>.json tells its end
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, data_parallel, max_epochs


def main(folder: Path, which: str, epochs: int) -> None:
    """One run."""
    session = torchrelay.init()
    torchrelay.seed(0)
    model, held = nn.Linear(3, 3), dict[str, Any]()
    trained = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("shares", blobs={"held": held, "model": model, "optimizer": optimizer})

    def moment() -> torch.Tensor:
        return optimizer.state[model.weight]["momentum_buffer"]

    @job.epoch
    def epoch(ctx: Any) -> None:
        loss = trained(torch.ones(2, 3) * ctx.epoch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ctx.epoch == 1 and (which == "all" or ctx.rank == 0):
            held["moment"] = moment()
        elif ctx.epoch == 1 and which == "copies":
            held["moment"] = moment().clone()
        moment().mul_(0.5)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, folder / "run", best=None, code=False).train(session)
    told = {
        "one": "moment" in held and held["moment"].data_ptr() == moment().data_ptr(),
        "weight": model.weight.tolist(),
        "moment": moment().tolist(),
        "held": held["moment"].tolist() if "moment" in held else None,
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
