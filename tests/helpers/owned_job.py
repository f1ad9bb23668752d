"""Jobs whose nodes own different leaves: stages, experts, an average on one rank, a part of the optimizer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from state_hash import sha256_of
from torch import nn

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs
from torchrelay.jobs.cluster import NodePlace
from torchrelay.runners.session.base import SessionBase

Blobs = dict[str, Any]
Built = tuple[Blobs, Callable[[int], None]]
"""Blobs of one rank, and a step of it in an epoch."""


def _linear(fill: float) -> nn.Linear:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 7 + fill)
    return layer


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, alike: tuple[str, ...] = ()) -> Any:
    """A step with gradients made from the parameters: of those that are `alike` the same on all ranks."""

    def step(epoch: int) -> None:
        for name, parameter in model.named_parameters():
            factor = 1 if name.startswith(alike) else torch.rand(())
            parameter.grad = (parameter.detach().cos() + epoch) * factor
        optimizer.step()

    return step


def stages(rank: int) -> Built:
    """Every rank has a layer of its own in one module, and an optimizer for it."""
    model = nn.ModuleDict({f"layer{rank}": _linear(rank)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}, _learn(model, optimizer)


def experts(rank: int) -> Built:
    """All ranks share a layer, each has an expert beside it, with a buffer of its own."""
    expert = _linear(rank)
    expert.register_buffer("seen", torch.zeros(()))
    model = nn.ModuleDict({"shared": _linear(9), f"expert{rank}": expert})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    learn = _learn(model, optimizer, ("shared",))

    def step(epoch: int) -> None:
        learn(epoch)
        expert.seen += 1 + rank

    return {"model": model, "optimizer": optimizer}, step


def named_stages(rank: int) -> Built:
    """Every rank has blobs of its own names."""
    layer = _linear(rank)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    return {f"stage{rank}": layer, f"optimizer{rank}": optimizer}, _learn(layer, optimizer)


def average(rank: int) -> Built:
    """Rank 0 alone keeps an average of the weights, and a tensor beside it."""
    return _averaged(keeps=rank == 0)


def last_average(rank: int) -> Built:
    """The last rank alone does, which is another one when there are more."""
    return _averaged(keeps=rank == int(os.environ.get("WORLD_SIZE", "1")) - 1)


def _averaged(*, keeps: bool) -> Built:
    model = _linear(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learn = _learn(model, optimizer, ("",))
    blobs: Blobs = {"model": model, "optimizer": optimizer}
    if keeps:
        blobs |= {"ema": copy.deepcopy(model), "best": torch.zeros(2)}

    def step(epoch: int) -> None:
        learn(epoch)
        if keeps:
            blobs["best"] += epoch
            with torch.no_grad():
                for mean, one in zip(blobs["ema"].parameters(), model.parameters(), strict=True):
                    mean.lerp_(one, 0.5)

    return blobs, step


class Sometimes:
    """An object whose state has a tensor on one rank, and None on others."""

    def __init__(self, rank: int) -> None:
        self.rank, self.tensor, self.count = rank, None, 0
        if rank == 1:
            self.tensor = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.count = state["tensor"], state["count"]


def sometimes(rank: int) -> Built:
    """See the class."""
    one = Sometimes(rank)

    def step(epoch: int) -> None:
        one.count += 1
        if one.tensor is not None:
            one.tensor = one.tensor + epoch

    return {"one": one}, step


def part_of_state(rank: int) -> Built:
    """All ranks have the model; each has optimizer state for the part that it steps, as ZeRO does."""
    model = nn.ModuleDict({"a": _linear(1), "b": _linear(2)})
    mine = "ab"[rank % 2]
    optimizer = torch.optim.AdamW(model[mine].parameters(), lr=0.1)

    def step(epoch: int) -> None:
        for parameter in model[mine].parameters():
            parameter.grad = parameter.detach().cos() + epoch
        optimizer.step()
        if dist.is_initialized() and dist.get_world_size() > 1:
            for index, name in enumerate("ab"):
                for parameter in model[name].parameters():
                    dist.broadcast(parameter.data, index)

    return {"model": model, "optimizer": optimizer}, step


def zero_redundancy(rank: int) -> Built:
    """The local optimizer of torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(_linear(1), _linear(2), _linear(3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    step = _learn(model, optimizer, ("",))
    return {"model": model, "optimizer": optimizer.optim}, step


def zero_scheduled(rank: int) -> Built:
    """The local optimizer, and a scheduler of the ZeroRedundancyOptimizer, which is no blob."""
    blobs, step, _ = _zero_with_rates(rank)
    return blobs, step


def zero_itself(rank: int) -> Built:
    """A ZeroRedundancyOptimizer as a blob, two groups of parameters, and its scheduler."""
    blobs, step, zero = _zero_with_rates(rank)
    return {**blobs, "optimizer": zero}, step


def _zero_with_rates(rank: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(_linear(1), _linear(2), _linear(3))
    groups = [{"params": [*model[:2].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.2}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.5)
    learn = _learn(model, zero, ("",))

    def step(epoch: int) -> None:
        learn(epoch)
        scheduler.step()

    return {"model": model, "optimizer": zero.optim, "scheduler": scheduler}, step, zero


def tally(rank: int) -> Built:
    """A dict, and a tensor, that each rank counts in for itself."""
    counts, seen = {"steps": 0}, torch.zeros(2)

    def step(epoch: int) -> None:
        counts["steps"] += rank + 1
        seen.add_(rank + 1)

    return {"counts": counts, "seen": seen}, step


def noted(rank: int) -> Built:
    """Rank 0 registers a note, rank 1 makes one of that name in `init`."""
    return {"model": _linear(1), **({"note": {"n": 0}} if rank == 0 else {})}, lambda epoch: None


KINDS: dict[str, Callable[[int], Built]] = {
    one.__name__: one
    for one in (
        *(stages, experts, named_stages, average, last_average, sometimes, part_of_state, tally),
        *(zero_redundancy, zero_scheduled, zero_itself),
    )
}


def raises_on_rank_1(values: dict[str, Any], place: NodePlace) -> Any:
    """A policy that has an error on one rank alone."""
    if place.rank == 1:
        raise ValueError("odd policy")
    return next(iter(values.values()))


def run(session: SessionBase, run_dir: Path, kind: str, epochs: int, **how: Any) -> dict[str, str]:
    """Train to an epoch; a digest of each blob's state by its name, or of what was refused, as `error`."""
    scope, reshard = how.pop("scope", None), how.pop("reshard", None)
    torchrelay.seed(0)
    rank = session.local_nodes[0].rank
    blobs, step = {**KINDS, "noted": noted}[kind](rank)
    job = Job("owned")
    job.blobs.add(blobs, scope=scope, reshard=raises_on_rank_1 if reshard == "raises on rank 1" else reshard)
    before = {name: sha256_of(_content(value)) for name, value in blobs.items()}

    @job.init
    def make(ctx: Context) -> None:
        if kind == "noted" and rank == 1:
            ctx["note"] = {"n": 1}

    @job.epoch
    def learn(ctx: Context) -> None:
        step(ctx.epoch)

    job.stop_when(max_epochs(epochs))
    try:
        JobRunner(job, run_dir, best=None, **how).train(session)
    except Exception as error:
        after = {name: sha256_of(_content(value)) for name, value in blobs.items()}
        return {"error": f"{type(error).__name__}: {error}", "untouched": str(before == after)}
    held = sorted(session.workspace().entries())
    return {name: sha256_of(_content(value)) for name, value in blobs.items()} | {"workspace": repr(held)}


def _content(value: Any) -> Any:
    """The state of a blob; that of an optimizer in the order of its parameters."""
    if isinstance(value, torch.optim.Optimizer):
        state = getattr(value, "optim", value).state_dict()
        return [sorted(state["state"].items()), state["param_groups"]]
    return value.state_dict() if hasattr(value, "state_dict") else value
