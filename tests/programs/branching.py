"""A program that can be told where to resume; its state tells which calls made it.

branching.py FOLDER LABEL KILLS [--resume-from-epoch N] [--again]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from killing import Kill, Killer
from state_hash import sha256_of

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs

EPOCHS = 6


def main() -> None:
    """Train, or continue, or rewind, as the command line says."""
    folder, label = Path(sys.argv[1]), sys.argv[2]
    killer = Killer(folder / "kills", tuple(Kill(*one) for one in json.loads(sys.argv[3])))
    torchrelay.seed(0)
    weight = torch.zeros(3)
    job = Job("branching", blobs={"weight": weight, "labels": []})

    @job.epoch
    def grow(ctx: Context) -> None:
        with (folder / "epochs.txt").open("a") as file:
            file.write(f"{label} {ctx.epoch}\n")
        ctx["labels"] = [*ctx["labels"], label]
        for step in range(1, 4):
            weight.add_(torch.rand(3))
            killer.at(ctx.epoch, step, ctx.rank)

    @job.exit
    def tell(ctx: Context) -> None:
        (folder / f"{label}.txt").write_text(sha256_of(weight))

    job.stop_when(max_epochs(EPOCHS))
    JobRunner(job, folder / "run").main(sys.argv[4:])


if __name__ == "__main__":
    main()
