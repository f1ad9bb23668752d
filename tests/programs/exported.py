"""Trains a module that is sharded over the ranks (FSDP2) and exports its epochs into the folder given."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay
from torchrelay import Job, JobRunner, OnnxExport, max_epochs


class OfTheScript(nn.Module):
    """Known to this script alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


session = torchrelay.init()
torchrelay.seed(1)
model = OfTheScript()
fully_shard(model, mesh=init_device_mesh("cpu", (session.peers.size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = Job("exported", blobs=dict(model=model, optimizer=optimizer))


@job.epoch
def train(ctx: torchrelay.Context) -> None:
    x = torch.randn(4, 5)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ctx.log("loss", loss)


job.stop_when(max_epochs(2))
export = OnnxExport(model, torch.ones(3, 5), every=2, build=OfTheScript)
JobRunner(job, sys.argv[1], exports=[export], code=False).main([])
