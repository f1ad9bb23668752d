"""Run by torchrun: trains a part of a sharded network; the rest is frozen.

frozen_shards.py FOLDER KIND STAGE...
    sync, async     3 epochs; RUN-EPOCH.json gets digests of the whole state that each of them ended with
    moved           2 more epochs, on another mesh, in a copy of what `sync` left
    resume          2 more epochs on the same mesh, in what `sync` left
    earlier         3 epochs as they were written when replicas shared the writing by rule 1
    later           2 more by today's rule, in what `earlier` left
RUN-start-EPOCH.json is the state with which these began.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.state import leaf
from torchrelay.runners.training.exit import run_and_leave


class Net(nn.Module):
    """A large layer that stays as it is, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(34, 20_002)
        self.mid = nn.Linear(20_002, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mid(torch.relu(self.up(x)))))


def sharded(model: Net, kind: str) -> Net:
    """Freeze two layers and shard all; `columns` splits other dimensions than `fsdp`, `plain` none."""
    for frozen in (model.up, model.mid):
        frozen.requires_grad_(False)
    if kind == "plain":
        return model
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    elif kind == "columns":
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Shard(one.ndim - 1))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fs")))
    elif kind == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "mid": RowwiseParallel()})
    return model


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """What tells tensors apart."""
    return {
        name: f"{list(one.shape)} {hashlib.sha256(one.numpy().tobytes()).hexdigest()}"
        for name, one in sorted(tensors.items())
    }


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered; all ranks must ask together."""
    found = {name: one.detach() for name, one in model.state_dict().items()}
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items()}


def train(session: Any, run: Path, kind: str, epochs: int, **options: Any) -> None:
    """Train up to an epoch, and tell what the network was at the start and after each one."""
    torchrelay.seed(3)
    model = sharded(Net(), kind)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    job = Job("shards", blobs={"model": model, "optimizer": optimizer})
    begun: list[int] = []

    def tell(moment: str) -> None:
        state = digests(whole(model))
        if session.peers.rank == 0:
            Path(f"{run}-{moment}.json").write_text(json.dumps(state))

    @job.epoch
    def learn(ctx: Context) -> None:
        if not begun:
            begun.append(ctx.epoch)
            tell(f"start-{ctx.epoch - 1}")
        loss = F.mse_loss(model(torch.randn(4, 34)), torch.ones(4, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(str(ctx.epoch))

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, **options).train(session)


def main() -> None:
    """Carry out the stages in their order."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    session = torchrelay.init()
    for stage in sys.argv[3:]:
        if stage in ("sync", "async"):
            train(session, folder / stage, kind, 3, reuse=True, keep_last=2, asynchronous=stage == "async")
        elif stage == "resume":
            train(session, folder / "sync", kind, 5, reuse=True, keep_last=2)
        elif stage == "earlier":
            leaf.Mesh = partial(Mesh, rule=1)  # type: ignore[misc,assignment]
            train(session, folder / "earlier", kind, 3, reuse=True)
        elif stage == "later":
            train(session, folder / "earlier", kind, 5, reuse=True)
        else:
            if session.peers.rank == 0:
                shutil.copytree(folder / "sync", folder / "moved")
            session.peers.exchange("copied", None)
            train(session, folder / "moved", "columns" if kind == "fsdp" else "fsdp", 5, reuse=True)


if __name__ == "__main__":
    run_and_leave(main)
