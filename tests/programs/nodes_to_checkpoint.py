"""Three ranks of which some are saved.

nodes_to_checkpoint.py <run> <nodes> <epochs>
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, data_parallel, max_epochs


def main(run: str, nodes: str, epochs: int) -> None:
    """One run; each rank prints its weight and what it counted."""
    session = torchrelay.init()
    torchrelay.seed(0)
    model, own = nn.Linear(3, 3), torch.zeros(1)
    trained = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("some", blobs={"model": model, "optimizer": optimizer}, nodes_to_checkpoint=nodes.split(","))
    job.blobs.add(own=own, scope="rank")

    @job.init
    def init(ctx: Any) -> None:
        dist.barrier()
        ctx["step"] = ctx.rank + 1

    @job.epoch
    def epoch(ctx: Any) -> None:
        assert ctx["step"] == ctx.rank + 1
        own.add_(ctx.rank + 1)
        loss = trained(torch.ones(2, 3) * ctx.epoch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None, code=False).train(session)
    weight = model.weight.detach().double().sum().item()
    sys.stdout.write(f"rank {dist.get_rank()} weight {weight.hex()} own {own.item()}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
