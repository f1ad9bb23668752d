"""Extends models of ONNX files and trains them with DDP: one epoch, resumed for a second, and both at once.

imported_onnx.py <folder>   with <name>.onnx for every name in the table of models
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay import Context, Job, JobRunner, OnnxModule, data_parallel, max_epochs

STEPS = 2
WIDTHS = {"mlp": 16, "convolution": 64, "transformer": 16, "lstm": 6}
"""What a model gives without its last operator."""


class Extended(OnnxModule):
    """The model of a file without its last operator, and a head of our own."""

    def __init__(self, path: Path, width: int) -> None:
        super().__init__(path, drop_last=1)
        self.top = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.top(super().forward(x))


def batch(name: str, rows: int, seed: int) -> torch.Tensor:
    """Inputs as the model takes them."""
    made = torch.Generator().manual_seed(seed)
    if name == "transformer":
        return torch.randint(0, 11, (rows, 5), generator=made)
    shape = {"mlp": (8,), "convolution": (1, 8, 8), "lstm": (5, 8)}[name]
    return torch.randn(rows, *shape, generator=made)


def extended(name: str, folder: Path) -> Extended:
    """The model as it is before training, alike everywhere."""
    torchrelay.seed(0)
    return Extended(folder / f"{name}.onnx", WIDTHS[name]).train()


def train(name: str, folder: Path, run: str, epochs: int, session: Any) -> dict[str, torch.Tensor]:
    """Train objects made anew up to this epoch; the state at the end."""
    model = extended(name, folder)
    wrapped = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = Job(name, blobs=dict(model=model, optimizer=optimizer))

    @job.epoch
    def steps(ctx: Context) -> None:
        for step in range(STEPS):
            x = batch(name, 4, 100 * ctx.epoch + 10 * step + ctx.rank)
            loss = wrapped(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.log("loss", loss)

    job.stop_when(max_epochs(epochs))
    result = JobRunner(job, str(folder / "runs" / run)).train(session)
    assert int(result) == epochs
    return {key: value.clone() for key, value in model.state_dict().items()}


def main(folder: Path) -> None:
    session = torchrelay.init(seed=0)
    for name in WIDTHS:
        first = train(name, folder, name, 1, session)
        resumed = train(name, folder, name, 2, session)
        at_once = train(name, folder, f"{name}-at-once", 2, session)
        assert any(not torch.equal(first[key], resumed[key]) for key in first), name
        for key, value in at_once.items():
            assert torch.equal(value, resumed[key]), (name, key)
        print(f"{name} resumed to the same bits", flush=True)
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
