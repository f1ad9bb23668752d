"""Trains a small convolutional network on handwritten digits, the way a torchrelay job is written.

    python examples/digits.py runs/digits
    torchrun --standalone --nproc-per-node=2 examples/digits.py runs/digits

Run the same command again after a crash and it carries on; `--resume-from-epoch 2` rewinds. The data
are the 1,797 scans that ship with scikit-learn. `--batch-size N` is that of all ranks together,
`--watch SECS` prints where the epoch is, so often.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs

EPOCHS = 8


class Net(nn.Module):
    """Two convolutions with batch norm, dropout, one linear layer: 8 x 8 grey pixels to 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(pixels))


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The scans in three parts, always the same ones: train 1,197, validation 300, test 300."""
    scans = load_digits()
    pixels = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(scans.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:1197], "val": order[1197:1497], "test": order[1497:]}
    return {name: (pixels[index], labels[index]) for name, index in parts.items()}


@torch.no_grad()
def accuracy(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The share of digits that are read right."""
    model.eval()
    pixels, labels = part
    return (model(pixels).argmax(1) == labels).float().mean().item()


def print_step(ctx: torchrelay.Context) -> None:
    """Print the progress within the epoch; a report step, called during training."""
    if ctx.rank == 0:
        print(f"epoch {ctx.epoch}, step {ctx.step}", flush=True)


def main(run_dir: str, batch_size: int = 64, watch_secs: float | None = None) -> None:
    session = torchrelay.init(seed=0)
    data = digits()
    model = Net().to(session.device)
    trained = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = EpochLoader(data["train"], batch_size=batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    job = Job("digits", blobs=dict(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader))

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        trained.train()
        for batch in ctx.steps(loader):
            pixels, labels = batch
            loss = F.cross_entropy(trained(pixels.to(ctx.device)), labels.to(ctx.device))
            optimizer.zero_grad()
            (loss * batch.weight).backward()
            optimizer.step()
            ctx.log("train/loss", loss, weight=batch.count)
        scheduler.step()

    @job.epoch
    def evaluate(ctx: torchrelay.Context) -> None:
        ctx.log("val/acc", accuracy(model, data["val"]))
        ctx.log("test/acc", accuracy(model, data["test"]))

    if watch_secs is not None:
        job.epoch_group.report_step(print_step, interval=watch_secs)
    job.stop_when(max_epochs(EPOCHS))
    JobRunner(job, run_dir, best=("val/acc", "max")).main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?", default="runs/digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--watch", type=float, metavar="SECS")
    options, _ = parser.parse_known_args()  # --resume-from-epoch and its like are read by JobRunner.main()
    main(options.run_dir, options.batch_size, options.watch)
