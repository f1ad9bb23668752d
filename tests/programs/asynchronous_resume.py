"""Run by torchrun: asynchronous saves on all ranks, compared on disk, and resumed from every epoch.

asynchronous_resume.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from tear_job import torn, train

import torchrelay
from torchrelay.runners.leaving import run_and_leave

EPOCHS = 3


def main() -> None:
    """Train, compare every epoch with what this rank knows of it, resume from every epoch."""
    folder = Path(sys.argv[1])
    session = torchrelay.init()
    rank = session.env.rank
    whole = train(folder / "whole", EPOCHS, asynchronous=True, verify_staging="full")
    for epoch, content in whole.items():
        shared = {name: value for name, value in content.items() if "running" not in name}
        assert torn(folder / "whole", epoch, content if rank == 0 else shared) == []
    for epoch in range(EPOCHS):
        copy = folder / f"from {epoch}"
        if rank == 0:
            shutil.copytree(folder / "whole", copy)
        session.peers.exchange("copied", epoch)
        again = train(copy, EPOCHS, seed=50 + epoch, asynchronous=True, resume_from_epoch=epoch)
        for later, content in again.items():
            wrong = [name for name, value in content.items() if not torch.equal(value, whole[later][name])]
            assert not wrong, (epoch, later, wrong)
    (folder / f"rank-{rank}").write_text("exact\n")


if __name__ == "__main__":
    run_and_leave(main)
