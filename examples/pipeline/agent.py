"""Third stage: learns from a frozen expert to read digits of which every other pixel row is hidden."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import Reader, accuracy, runs_directory, train_stage
from torch import nn

from torchrelay import InitFrom, Upstream


def half_hidden(pixels: torch.Tensor) -> torch.Tensor:
    """The same with every other row black."""
    mask = torch.ones(8, 8)
    mask[::2] = 0
    return pixels * mask.flatten()


class Agent(nn.Module):
    """A reader that sees half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.reader(half_hidden(pixels))


def build() -> Any:
    teacher = Reader().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pixels, _ = batch
        return F.kl_div(model(pixels).log_softmax(1), teacher(pixels).softmax(1), reduction="batchmean")

    return {"agent": Agent(), "teacher": teacher}, loss


if __name__ == "__main__":
    train_stage(
        "agent",
        build,
        lambda model: ("test/acc", accuracy(model)),
        best=("test/acc", "max"),
        upstream={"expert": Upstream(f"{runs_directory()}/expert@best", keep="upstream.encoder")},
        init_from=[
            InitFrom("expert", into="agent.reader", prefix="expert"),
            InitFrom("expert", into="teacher", prefix="expert"),
        ],
    )
