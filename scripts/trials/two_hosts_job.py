"""A job for two hosts: four linear layers under DDP, large enough that every rank has bytes to write.

torchrun --nnodes=2 --nproc-per-node=2 ... scripts/trials/two_hosts_job.py RUN [EPOCHS]
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs

EPOCHS = 8


def main(run: str, epochs: int = EPOCHS) -> None:
    """Train; each rank says first where it is and whom it sees."""
    torchrelay.init(seed=3)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 10))
    trained = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = EpochLoader((torch.randn(128, 512), torch.arange(128) % 10), batch_size=16)
    job = Job("two-hosts", blobs=dict(model=model, optimizer=optimizer, loader=loader))

    @job.setup
    def say(ctx: torchrelay.Context) -> None:
        hosts = dict.fromkeys(node.host for node in ctx.session.nodes)
        line = (
            f"saw: rank {ctx.rank} of {ctx.world_size} is local rank {ctx.local_rank} on {ctx.host}; "
            f"hosts {', '.join(hosts)}\n"
        )
        os.write(1, line.encode())  # in one piece: the ranks of a host share the stream

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        for x, y in ctx.steps(loader):
            loss = F.cross_entropy(trained(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.log("loss", loss)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run).main()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
