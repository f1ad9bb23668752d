"""A job whose every kind of state matters: three optimizers train three networks side by side.

One epoch has three loops, one per learner: SGD with momentum, AdamW, fused AdamW; each with a
scheduler, batch norm, dropout, and shuffled data whose noise is drawn from Python's and numpy's
streams. `init` makes a count that is alike everywhere and a tally that differs between nodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from killing import Killer
from state_hash import hash_of_node
from torch import nn

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, data_parallel, max_epochs
from torchrelay.runners.session.base import SessionBase

EPOCHS = 4
SAMPLES = 70
STEPS_PER_LOOP = 4
"""At least; a tail of samples is a step of its own on few ranks."""
MADE_BY_INIT = ("count", "tally")


class Net(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 3)
        self.first = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The same samples always, whatever the program's seed."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 12, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


class Learner:
    """A network with all that trains it."""

    def __init__(self, kind: str, **ddp: Any) -> None:
        self.model = Net()
        self.trained = data_parallel(self.model, **ddp)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.loader = EpochLoader(data(), batch_size=16)

    def blobs(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer,
            "scheduler": self.scheduler, "loader": self.loader,
        }  # fmt: skip

    def step(self, batch: Any) -> None:
        x, y = batch
        noise = 1 + 0.01 * (random.random() + np.random.rand())
        loss = F.cross_entropy(self.trained(x * noise), y)
        self.optimizer.zero_grad()
        (loss * batch.weight).backward()
        self.optimizer.step()


@dataclass
class Trained:
    """What a run ended in, seen from one rank; `trail` has the state at both ends of every epoch."""

    last_epoch: int
    digest: str
    trail: dict[str, str] = field(default_factory=dict)


def train(
    session: SessionBase,
    where: Any,
    *,
    seed: int,
    killer: Killer | None = None,
    all_buffers: bool = False,
    ddp: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
    runner: dict[str, Any] | None = None,
    **how: Any,
) -> Trained:
    """Build everything anew from `seed` and train, as a program that was just started does.

    `where` and `runner` are JobRunner's. `all_buffers`: every rank's buffers count, not only those of
    rank 0, which DDP sends to the others.
    """
    torchrelay.seed(seed)
    forget_what_init_made(session)
    rank = session.local_nodes[0].rank
    learners = {kind: Learner(kind, **(ddp or {})) for kind in OPTIMIZERS}
    job = Job("exact", blobs={kind: learner.blobs() for kind, learner in learners.items()})
    trail: dict[str, str] = {}

    def digest() -> str:
        workspace = session.workspace()
        objects = {name: workspace[name] for name in workspace.own_names()}
        return hash_of_node(objects, buffers=all_buffers or rank == 0)

    @job.init
    def begin(ctx: Context) -> None:
        ctx["count"] = 0
        ctx["tally"] = torch.zeros(1, dtype=torch.float64)

    @job.epoch
    def note_begin(ctx: Context) -> None:
        trail[f"begin of {ctx.epoch}"] = digest()

    @job.epoch
    def learn(ctx: Context) -> None:
        for learner in learners.values():
            learner.trained.train()
            for batch in ctx.steps(learner.loader):
                learner.step(batch)
                if killer is not None:
                    killer.at(ctx.epoch, ctx.step, ctx.rank)
            learner.scheduler.step()
        ctx["count"] += 1
        ctx["tally"] = ctx["tally"] + ctx.rank + random.random()

    @job.epoch
    def note_end(ctx: Context) -> None:
        trail[f"end of {ctx.epoch}"] = digest()

    job.stop_when(max_epochs(epochs))
    last = JobRunner(job, where, **(runner or {})).train(session, **how)
    return Trained(int(last), digest(), trail)


def forget_what_init_made(session: SessionBase) -> None:
    """Take away what an earlier run in this process has left in the session's workspace."""
    workspace = session.workspace()
    for name in MADE_BY_INIT:
        if name in workspace:
            del workspace[name]


def expected_trail(whole: dict[str, str], since: int) -> dict[str, str]:
    """The part of an uninterrupted run's trail that a run resumed from epoch `since` has too."""
    return {moment: digest for moment, digest in whole.items() if int(moment.rsplit(" ", 1)[1]) > since}
