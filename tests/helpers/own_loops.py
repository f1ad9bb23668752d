"""One training in three faces: tasks of a job, the loop of a `Run`, and a loop with a `Checkpointer`."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import torchrelay
from torchrelay import Checkpointer, EpochLoader, Job, JobRunner, Run, data_parallel, max_epochs

EPOCHS = 4
Event = Callable[[int, int], None]
"""Called with epoch and step after each step."""


class Training:
    """A net with dropout, AdamW, a schedule and shuffled data; built anew it begins alike everywhere."""

    def __init__(self) -> None:
        torchrelay.seed(0)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.net: Any = data_parallel(self.model) if "RANK" in os.environ else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.loader = EpochLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
        self.blobs = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "loader": self.loader,
        }

    def step(self, batch: Any) -> torch.Tensor:
        """One step; returns the loss."""
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @property
    def digest(self) -> str:
        """Of all parameters and moments, and the next random number."""
        parts = [*self.model.parameters()]
        parts += [self.optimizer.state[one]["exp_avg"] for one in self.model.parameters()]
        data = b"".join(one.detach().numpy().tobytes() for one in [*parts, torch.rand(1)])
        return hashlib.sha256(data).hexdigest()


def job_face(training: Training, where: Path, event: Event, **options: Any) -> Any:
    """As tasks; returns the result."""
    job = Job(blobs=training.blobs)

    @job.epoch
    def epoch(ctx: Any) -> None:
        for batch in ctx.steps(training.loader):
            ctx.log("loss", training.step(batch))
            event(ctx.epoch, ctx.step)

    job.stop_when(max_epochs(EPOCHS))
    return JobRunner(job, where, best=("loss", "min"), **options).train()


def run_face(training: Training, where: Path, event: Event, **options: Any) -> Any:
    """As a loop of its own; returns the result."""
    with Run(where, training.blobs, best=("loss", "min"), **options) as run:
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps(training.loader):
                run.log("loss", training.step(batch))
                event(epoch, run.ctx.step)
    return run.result


def checkpointer_face(training: Training, where: Path, event: Event, **options: Any) -> Any:
    """As a loop that saves by itself; returns the number of the last epoch."""
    asynchronous = options.pop("asynchronous", False)
    with Checkpointer(where / "checkpoints", training.blobs, **options) as ckpt:
        start = ckpt.resume()
        for epoch in range(start.epoch + 1 if start else 1, EPOCHS + 1):
            losses = []
            for step, batch in enumerate(training.loader, 1):
                losses.append(float(training.step(batch)))
                event(epoch, step)
            ckpt.save(epoch, metrics={"loss": sum(losses) / len(losses)}, asynchronous=asynchronous)
    return EPOCHS


FACES: dict[str, Callable[..., Any]] = {
    "job": job_face,
    "run": run_face,
    "checkpointer": checkpointer_face,
}


def at(epoch: int, step: int, act: Callable[[], None]) -> Event:
    """Act once, after that step."""

    def event(now: int, at_step: int) -> None:
        if (now, at_step) == (epoch, step):
            act()

    return event


def nothing(epoch: int, step: int) -> None:
    """No event."""


def kill() -> None:
    """What a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stored(where: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The digests of all leaves of all epochs."""
    for epoch in torchrelay.open_checkpoint(where).epochs:
        found = torchrelay.open_checkpoint(where, epoch=epoch)
        yield epoch, {name: blob.digest for name, blob in found.blobs.items()}
