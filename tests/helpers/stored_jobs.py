"""A small job whose run lies in a store, and hosts to run it on: workspaces of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, RunResult, max_epochs


def job_of(epochs: int, each: Callable[[Any], None] | None = None) -> Job:
    """A linear model that learns from random numbers; `each` is called in every epoch, after its step."""
    torchrelay.seed(5)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("stored", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        loss = model(torch.randn(8, 6)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log("train/loss", loss)
        if each is not None:
            each(ctx)

    job.stop_when(max_epochs(epochs))
    return job


def train(
    place: str | Path, epochs: int, each: Callable[[Any], None] | None = None, **options: Any
) -> RunResult:
    """Train there."""
    options = {"code": False, **options}
    return JobRunner(job_of(epochs, each), place, **options).train(LocalSession())


def weights(place: str | Path, epoch: int | str = "last") -> torch.Tensor:
    """Of an epoch of a run."""
    return torchrelay.open_checkpoint(place, epoch).load_tensors("model.weight")["model.weight"]


class Hosts:
    """Which host this process plays: each has a workspace of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, patch

    def on(self, name: str) -> Path:
        """From now on this process is on that host; returns where it has workspaces."""
        path = self.folder / name
        self._patch.setenv("TORCHRELAY_WORKSPACE", str(path))
        return path

    def files(self) -> list[Path]:
        """All files of all workspaces."""
        return [one for one in self.folder.rglob("*") if one.is_file()]


def in_memory(url: str) -> dict[str, bytes]:
    """The files of a run at a memory:// URL, without its checkpoints, by their names in the run."""
    root = "/" + url.partition("://")[2]
    system = fsspec.filesystem("memory")
    names = [name for name in system.find(root) if not name.startswith(f"{root}/checkpoints/")]
    return {name.removeprefix(f"{root}/"): system.cat_file(name) for name in names}


def put(url: str, data: bytes) -> None:
    """Put an object at a memory:// URL."""
    fsspec.filesystem("memory").pipe_file("/" + url.partition("://")[2], data)


def remove(url: str) -> None:
    """Remove an object at a memory:// URL."""
    fsspec.filesystem("memory").rm_file("/" + url.partition("://")[2])
