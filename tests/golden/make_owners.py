"""Wrote manifest_owners_v1.json: of two nodes that share a layer, have an expert each, and one an average.

python tests/golden/make_owners.py tests/golden/manifest_owners_v1.json
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs


def model(ctx: Any) -> nn.Module:
    """A layer that both nodes have, and one of each node's own."""
    torchrelay.seed(0)
    return nn.ModuleDict({"shared": nn.Linear(2, 2), f"expert{ctx.rank}": nn.Linear(2, 2)})


def main(target: str) -> None:
    """Save epoch 0 and keep its manifest."""
    job = Job("owners", blobs={"model": model})
    job.blobs(own=lambda ctx: torch.full((2,), float(ctx.rank)), scope="rank")

    @job.init
    def begin(ctx: Any) -> None:
        if ctx.rank == 0:
            ctx["average"] = torch.zeros(2)

    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with tempfile.TemporaryDirectory() as folder:
        with LocalSession(["trainer_0", "trainer_1"]) as session:
            JobRunner(job, MultiNodeCheckpointManager(folder)).train(session)
        (found,) = Path(folder, "data").glob("e00000000-*/manifest.json")
        shutil.copy(found, target)


if __name__ == "__main__":
    main(sys.argv[1])
