"""First stage: an autoencoder. See README.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import Autoencoder, digits, train_stage
from torch import nn


def build() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pixels, _ = batch
        return F.mse_loss(model(pixels), pixels)

    return {"autoencoder": Autoencoder()}, loss


@torch.no_grad()
def measure(model: nn.Module) -> tuple[str, float]:
    pixels, _ = digits()["test"]
    return "test/mse", F.mse_loss(model(pixels), pixels).item()


if __name__ == "__main__":
    train_stage("encoder", build, measure, best=("test/mse", "min"))
