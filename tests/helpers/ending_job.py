"""A job that is left in the middle of its epochs: what it ends in must not tell.

An epoch has a task that begins it, two with counted loops over a loader and a range, and two that evaluate,
one of them over a registered loader. Every batch is a tick; a schedule says at which ticks somebody asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from exact_job import OPTIMIZERS, Net, data
from state_hash import hash_of_node

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, RunResult, data_parallel, max_epochs
from torchrelay.runners.session.base import SessionBase

EPOCHS = 3


@dataclass
class Start:
    """One start of the program: what it ended in, and what was seen on the way."""

    result: RunResult | None = None
    digest: str = ""
    ticks: int = 0
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)
    """The metrics as every epoch's first task sees them."""


def start(
    session: SessionBase,
    run_dir: Path,
    at: Callable[[int, Context], None] = lambda tick, ctx: None,
    *,
    kind: str = "adamw",
    seed: int = 5,
    epochs: int = EPOCHS,
    **how: Any,
) -> Start:
    """Build everything anew from `seed` and train; `at` is called in every tick."""
    torchrelay.seed(seed)
    told = Start()
    rank = session.local_nodes[0].rank
    model = Net()
    trained = data_parallel(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = EpochLoader(data(), batch_size=16)
    checks = EpochLoader(data(), batch_size=24)
    count = torch.zeros(1, dtype=torch.float64)
    blobs = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "checks": checks,
    }
    job = Job("ending", blobs=blobs)
    job.blobs(count=count, scope="rank", reshard="by_rank")

    def tick(ctx: Context) -> None:
        told.ticks += 1
        at(told.ticks, ctx)

    def loss_of(batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(trained(x * (1 + 0.01 * random.random())), y)

    @job.epoch
    def begin(ctx: Context) -> None:
        told.values.append(dict(ctx.metrics))
        ctx.log("begun", random.random(), "sum")

    @job.epoch
    def learn(ctx: Context) -> None:
        trained.train()
        torch.rand(3)
        count.add_(1)
        optimizer.param_groups[0]["weight_decay"] *= 1.1
        ctx.log("prelude", 1, "sum")
        for batch in ctx.steps(loader):
            told.seen.append((loader.epoch, batch.indices.tolist()))
            loss = loss_of(batch)
            optimizer.zero_grad()
            (loss * batch.weight).backward()
            optimizer.step()
            ctx.log("loss", loss, weight=batch.count)
            ctx.log("worst", loss, "max")
            tick(ctx)
        scheduler.step()
        count.add_(ctx.rank + random.random())

    @job.epoch
    def refine(ctx: Context) -> None:
        for number in ctx.steps(range(5)):
            count.add_(number * torch.rand(1, dtype=torch.float64))
            ctx.log("last", float(count), "last")
            tick(ctx)

    @job.epoch
    def check(ctx: Context) -> None:
        trained.eval()
        total = 0.0
        with torch.no_grad():
            for batch in ctx.steps(checks, count=False):
                total += float(loss_of(batch))
                ctx.log("check/loss", total)
                tick(ctx)
        ctx.log("check/total", total)

    @job.epoch(on="rank0")
    def alone(ctx: Context) -> None:
        model.eval()
        with torch.no_grad():
            for x, _ in ctx.steps(EpochLoader(data(), batch_size=35, seed=1).placed(0, 1), count=False):
                ctx.log("alone", model(x).mean())

    @job.epoch(every=2)
    def sometimes(ctx: Context) -> None:
        for number in ctx.steps([1, 2], count=False):
            ctx.log("noise", number * random.random())
            tick(ctx)

    job.stop_when(max_epochs(epochs))
    told.result = JobRunner(job, run_dir, best=("check/total", "min"), max_attempts=0, **how).train(session)
    told.values.append(dict(told.result.metrics))
    objects = {name: session.workspace()[name] for name in session.workspace().own_names()}
    told.digest = hash_of_node(objects, buffers=rank == 0)
    return told
