"""Run by torchrun, or alone: BatchNorm buffers in parts and copies of a DDP module, one run per kind.

    buffers.py EPOCHS        resumes what lies in the current folder, up to EPOCHS

Each rank writes what it had after the load, and at the end, to <kind>.<epochs>.<rank>.json.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchrelay
from torchrelay import Job, JobRunner, data_parallel, max_epochs
from torchrelay.runners.training.exit import run_and_leave

KINDS = ("parts", "averaged", "wrapped", "copied", "doubled", "dict", "object", "late")


class Shadow:
    """An average in the way of libraries that keep a dict beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = copy.deepcopy(model.state_dict())

    def update(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.shadow[name].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)


def train(kind: str, epochs: int, rank: int) -> None:
    """Train one run; the copy follows the model after each epoch."""
    torchrelay.seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(encoder, nn.Linear(8, 1))
    averaged, copied = AveragedModel(model), copy.deepcopy(model)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shadow = Shadow(model)
    trained = None if kind == "late" else data_parallel(model)
    if kind == "wrapped":
        averaged = AveragedModel(trained or model)
    if kind == "doubled" and trained is not None:
        trained(torch.ones(2, 4)).sum().backward()
        copied = copy.deepcopy(trained)
    blobs: dict[str, Any] = {
        "parts": {"encoder": encoder, "head": model[1]},
        "averaged": {"model": model, "ema": averaged},
        "wrapped": {"model": model, "ema": averaged},
        "copied": {"model": model, "ema": copied},
        "doubled": {"model": model, "ema": copied},
        "dict": {"model": model, "ema": held},
        "object": {"model": model, "ema": shadow},
        "late": {"model": model},
    }[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(kind, blobs={**blobs, "optimizer": optimizer})
    seen: dict[str, Any] = {}

    def now() -> dict[str, list[float]]:
        copies = {"averaged": averaged, "wrapped": averaged, "copied": copied, "doubled": copied}
        state = {"dict": held, "object": shadow.shadow}.get(kind)
        state = copies.get(kind, model).state_dict() if state is None else state
        found = {name: one.flatten().tolist() for name, one in state.items() if "running" in name}
        wrapped = "module." if kind == "doubled" else ""  # alone there is no wrapper
        return {
            name.replace("module.module.", "module.").removeprefix(wrapped): one
            for name, one in found.items()
        }

    @job.epoch
    def epoch(ctx: Any) -> None:
        nonlocal trained
        seen.setdefault("loaded", now())
        trained = trained or data_parallel(model)
        noise = torch.Generator().manual_seed(100 * ctx.epoch + ctx.rank)
        for _ in range(3):
            optimizer.zero_grad()
            trained(torch.randn(16, 4, generator=noise)).square().mean().backward()
            optimizer.step()
        averaged.update_parameters(trained if kind == "wrapped" else model)
        copied.load_state_dict((trained if kind == "doubled" else model).state_dict())
        shadow.update(model)
        for name, tensor in model.state_dict().items():
            held[name].copy_(tensor)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, kind, best=None).train()
    Path(f"{kind}.{epochs}.{rank}.json").write_text(json.dumps({**seen, "ended": now()}))


def main() -> None:
    """Train every kind."""
    session = torchrelay.init(seed=0)
    for kind in KINDS:
        train(kind, int(sys.argv[1]), session.env.rank)


if __name__ == "__main__":
    run_and_leave(main)
