"""Trains a network wrapped by FSDP1, or a plain one; tells the whole state of every epoch.

fsdp1.py exact <folder>        4 epochs at once; 2, then 2 more by objects made anew; asynchronous as well
fsdp1.py reads <folder> <run>  continues the run, saved by other ranks, for no more than a look
fsdp1.py refused <folder>      what a save says of FSDP1 without a device mesh, and of the bare module
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs
from torchrelay.errors import RelayError

EPOCHS = 4


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 18)
        self.down = nn.Linear(18, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def wrapped(kind: str, **more: Any) -> nn.Module:
    """The network by FSDP1 over all ranks; `hybrid` keeps replicas too, `plain` leaves it whole."""
    model = Net()
    if kind == "plain":
        return model
    ranks = dist.get_world_size()
    options: dict[str, Any] = {"device_mesh": init_device_mesh("cpu", (ranks,)), "use_orig_params": True}
    if kind == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (2, ranks // 2))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if kind == "flat":
        options["use_orig_params"] = False
    policy = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
    )
    options = {**options, "auto_wrap_policy": policy, "device_id": torch.device("cpu"), **more}
    return FullyShardedDataParallel(model, **options)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of every tensor, gathered; all ranks must ask together."""
    options = StateDictOptions(full_state_dict=True)
    weights, found = get_state_dict(model, optimizer, options=options)
    told = {name: digest(one) for name, one in weights.items()}
    for name, state in found["state"].items():
        told |= {f"{name}.{key}": digest(one) for key, one in state.items()}  # type: ignore[union-attr]
    return told


def digest(tensor: torch.Tensor) -> str:
    data = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return f"{list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def run(session: Any, where: Path, kind: str, epochs: int, **options: Any) -> list[dict[str, str]]:
    """Build everything and train; the state at the start of this process, if any, and after each epoch."""
    torchrelay.seed(3)
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    job = Job("fsdp1", blobs={"net": torchrelay.fsdp_state(model, optimizer)})
    told: list[dict[str, str]] = []

    @job.epoch
    def learn(ctx: Context) -> None:
        if not told and optimizer.state:
            told.append(state_of(model, optimizer))
        for _ in range(2):
            loss = F.mse_loss(model(torch.randn(4, 13)), torch.ones(4, 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        told.append(state_of(model, optimizer))

    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, **options).train(session)
    return told


def refused(session: Any, folder: Path) -> dict[str, str]:
    """The messages."""
    told = {}
    for name in ("no mesh", "bare"):
        model = wrapped("fsdp", device_mesh=None) if name == "no mesh" else wrapped("fsdp")
        optimizer = torch.optim.AdamW(model.parameters())
        blobs = {"net": torchrelay.fsdp_state(model, optimizer)} if name == "no mesh" else {"net": model}
        job = Job("refused", blobs=blobs)
        job.epoch(lambda: None)
        job.stop_when(max_epochs(1))
        try:
            JobRunner(job, folder / name.replace(" ", "-")).train(session)
        except RelayError as error:
            told[name] = str(error)
    return told


def main() -> None:
    mode, folder, *rest = sys.argv[1:]
    session = torchrelay.init()
    told: dict[str, Any] = {}
    if mode == "refused":
        told = refused(session, Path(folder))
    elif mode == "exact":
        kinds = ("fsdp", "flat", *(("hybrid",) if dist.get_world_size() > 2 else ()))
        for kind in kinds:
            once = run(session, Path(folder, f"{kind}-once"), kind, EPOCHS)
            before = run(session, Path(folder, kind), kind, 2)
            options = {"asynchronous": True} if kind == "fsdp" else {}
            after = run(session, Path(folder, kind), kind, EPOCHS, **options)
            told[kind] = {"once": once, "before": before, "after": after}
    else:
        for name in rest:
            told[name] = run(session, Path(folder, name), "fsdp", EPOCHS + 1)[0]
    if session.peers.rank == 0:
        Path(folder, f"{mode}-{dist.get_world_size()}.json").write_text(json.dumps(told))
    session.close()


if __name__ == "__main__":
    main()
