"""Second stage: reads digits, beginning with the encoder of the first stage, which it goes on training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import Reader, accuracy, runs_directory, train_stage
from torch import nn

from torchrelay import InitFrom, Upstream


def build() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pixels, labels = batch
        return F.cross_entropy(model(pixels), labels)

    return {"expert": Reader()}, loss


if __name__ == "__main__":
    train_stage(
        "expert",
        build,
        lambda model: ("test/acc", accuracy(model)),
        best=("test/acc", "max"),
        # The decoder is nothing that an expert needs; it is kept because the pictures may be wanted later.
        upstream={"encoder": Upstream(f"{runs_directory()}/encoder@best", keep="autoencoder.decoder")},
        init_from=InitFrom("encoder", into="expert.encoder", prefix="autoencoder.encoder"),
    )
