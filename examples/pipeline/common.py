"""What the three stages share: the handwritten digits of scikit-learn, the networks, the loop."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from torchrelay import EpochLoader, Job, JobRunner, data_parallel, init, max_epochs

EPOCHS = 3


class Coder(nn.Module):
    """64 grey pixels to 32 numbers, or back."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layers(numbers)


class Autoencoder(nn.Module):
    """Learns what digits look like: pixels through 32 numbers to the same pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Coder(64, 32)
        self.decoder = Coder(32, 64)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(pixels))


class Reader(nn.Module):
    """Reads digits by an encoder and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Coder(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(pixels))


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The scans in two parts, always the same ones: train 1,497, test 300."""
    scans = load_digits()
    pixels = torch.tensor(scans.data, dtype=torch.float32) / 16
    labels = torch.tensor(scans.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return {
        "train": (pixels[order[:1497]], labels[order[:1497]]),
        "test": (pixels[order[1497:]], labels[order[1497:]]),
    }


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test digits that are read right."""
    pixels, labels = digits()["test"]
    return (model(pixels).argmax(1) == labels).float().mean().item()


def train_stage(
    name: str,
    build: Callable[[], tuple[dict[str, nn.Module], Callable[[nn.Module, Any], torch.Tensor]]],
    measure: Callable[[nn.Module], tuple[str, float]],
    best: tuple[str, Any],
    **options: Any,
) -> None:
    """Train the first of the modules that `build` makes, by the loss that it gives, into `runs/<name>`."""
    chosen = _options(name)
    first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    init(seed=0)
    modules, loss_of = build()
    learner = next(iter(modules.values()))
    trained = data_parallel(learner)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    loader = EpochLoader(digits()["train"], batch_size=64)
    job = Job(name, blobs={**modules, "optimizer": optimizer, "loader": loader})

    @job.epoch
    def train(ctx: Any) -> None:
        for batch in ctx.steps(loader):
            if first_try and (ctx.epoch, ctx.step, ctx.rank) == (chosen.kill_in_epoch, 5, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(trained, batch)
            optimizer.zero_grad()
            (loss * batch.weight).backward()
            optimizer.step()
            ctx.log("train/loss", loss, weight=batch.count)

    @job.epoch
    def evaluate(ctx: Any) -> None:
        ctx.log(*measure(learner))

    job.stop_when(max_epochs(EPOCHS))
    JobRunner(job, f"{chosen.runs}/{name}", best=best, **options).main([])


def runs_directory() -> str:
    """Where the runs of all stages lie, as the command line says."""
    return str(_options("").runs)


def _options(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Train the stage {name}.")
    parser.add_argument("runs", nargs="?", default="runs", help="the directory of the runs of all stages")
    parser.add_argument(
        "--kill-in-epoch", type=int, metavar="N", help="rank 1 kills itself in the middle of it, as a trial"
    )
    return parser.parse_args()
