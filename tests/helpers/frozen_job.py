"""A job of which few or many tensors change in an epoch, by a schedule; what each epoch holds is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay import Context, Job, JobRunner, LocalSession, max_epochs, open_checkpoint

SIZES = {"backbone": 400_000, "head": 30_000, "middle": 50_000, "tiny": 10}
"""Elements of 4 bytes of the parameters; the backbone is cut between nodes."""
OWN = 15_000
"""Elements of the tensor that every node has for itself."""
Changes = Mapping[int, Sequence[str]]
"""Epoch to the names that change in it: parameters, `own`."""


def value(name: str, epoch: int) -> torch.Tensor:
    """What a parameter is since it changed in an epoch (0: from the beginning)."""
    return torch.arange(SIZES.get(name, OWN), dtype=torch.float32) + 1000.0 * epoch


def expected(changes: Changes, epoch: int) -> dict[str, torch.Tensor]:
    """What an epoch holds: every name as it was changed last."""
    last = dict.fromkeys((*SIZES, "own"), 0)
    for number in range(1, epoch + 1):
        last.update(dict.fromkeys(changes.get(number, ()), number))
    return {name: value(name, number) for name, number in last.items()}


class Model(nn.Module):
    """Parameters of `SIZES`."""

    def __init__(self) -> None:
        super().__init__()
        for name in SIZES:
            self.register_parameter(name, nn.Parameter(value(name, 0)))


def frozen_job(changes: Changes) -> Job:
    """The job; `own` has the number of the node added."""
    job = Job("frozen")
    job.blobs(model=lambda ctx: Model(), scope="replicated")
    job.blobs(own=lambda ctx: value("own", 0) + ctx.rank, scope="rank", reshard="by_rank")

    @job.epoch
    def change(ctx: Context) -> None:
        for name in changes.get(ctx.epoch, ()):
            tensor = ctx["own"] if name == "own" else ctx["model"].get_parameter(name).data
            tensor.copy_(value(name, ctx.epoch) + (ctx.rank if name == "own" else 0))

    return job


def train(run: Path, epochs: int, changes: Changes, *, nodes: int = 1, **how: Any) -> None:
    """Train to an epoch in a session of emulated nodes."""
    job = frozen_job(changes)
    job.stop_when(max_epochs(epochs))
    resume = {"resume_from_epoch": how.pop("resume_from_epoch", None)}
    with LocalSession([f"trainer_{rank}" for rank in range(nodes)]) as session:
        JobRunner(job, run, **{"reuse": True, **how}).train(session, **resume)


def check_epoch(run: Path, epoch: int, changes: Changes, nodes: int = 1) -> None:
    """An epoch holds exactly what the schedule says."""
    checkpoint = open_checkpoint(run, epoch=epoch)
    wanted = expected(changes, epoch)
    found = checkpoint.load_tensors("model.*")
    assert {name.removeprefix("model.") for name in found} == set(SIZES)
    for name in SIZES:
        assert found[f"model.{name}"].equal(wanted[name]), (epoch, name)
    for rank in range(nodes):
        (own,) = checkpoint.load_tensors(f"trainer_{rank}:own").values()
        assert own.equal(wanted["own"] + rank), (epoch, rank)


def written(run: Path, epoch: int) -> int:
    """The bytes of the tries that were written at an epoch, on all branches."""
    tries = (run / "checkpoints/data").glob(f"e{epoch:08d}-*")
    return sum(file.stat().st_size for one in tries for file in one.glob("*.safetensors"))


def tries_of(run: Path, epoch: int) -> tuple[str, ...]:
    """The directories in which an epoch lies, its own first."""
    return open_checkpoint(run, epoch=epoch).manifest.tries
