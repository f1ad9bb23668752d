"""Trains a network that is sharded in one of several ways; tells the whole state of every epoch.

sharded.py exact <folder> <kind> ...     4 epochs at once; 2, then 2 more by objects made anew
sharded.py reads <folder> <kind> <run> ...   continue each run, saved by others, for no more than a look
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs

EPOCHS = 4


class Net(nn.Module):
    """Sizes that no number of ranks divides, a bias smaller than the mesh, a scalar state per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 18)
        self.down = nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """Shard a network over all ranks; `plain` leaves it whole."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        fully_shard(model.up)
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "fs")))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fs", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fs"])
    return model


def whole(value: Any) -> Any:
    """Optimizer state with every DTensor gathered."""
    if isinstance(value, torch.Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    return value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of every tensor, gathered; all ranks must ask together."""
    found = {name: whole(one.detach()) for name, one in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": whole(one) for key, one in state.items()}
    return {name: digest(one) for name, one in found.items()}


def digest(tensor: torch.Tensor) -> str:
    data = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return f"{list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def run(session: Any, where: Path, kind: str, epochs: int) -> list[dict[str, str]]:
    """Build everything and train; the state at the start of this process and after each epoch."""
    torchrelay.seed(3)
    model = sharded(Net(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    job = Job("sharded", blobs={"model": model, "optimizer": optimizer})
    told: list[dict[str, str]] = []

    @job.epoch
    def learn(ctx: Context) -> None:
        if not told:
            told.append(state_of(model, optimizer))
        for _ in range(2):
            x = torch.randn(4, 13)
            loss = F.mse_loss(model(x), torch.ones(4, 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        told.append(state_of(model, optimizer))

    job.stop_when(max_epochs(epochs))
    JobRunner(job, where).train(session)
    return told


def main() -> None:
    mode, folder, *rest = sys.argv[1:]
    session = torchrelay.init()
    told: dict[str, Any] = {}
    if mode == "exact":
        for kind in rest:
            once = run(session, Path(folder, f"{kind}-once"), kind, EPOCHS)
            before = run(session, Path(folder, kind), kind, 2)
            after = run(session, Path(folder, kind), kind, EPOCHS)
            told[kind] = {"once": once, "before": before, "after": after}
    else:
        kind = rest[0]
        for name in rest[1:]:
            told[name] = run(session, Path(folder, name), kind, EPOCHS + 1)[0]
    if session.peers.rank == 0:
        Path(folder, f"{mode}-{dist.get_world_size()}-{rest[0]}.json").write_text(json.dumps(told))
    session.close()


if __name__ == "__main__":
    main()
