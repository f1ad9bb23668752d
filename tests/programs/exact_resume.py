"""Run by torchrun: killed in every epoch and restarted; then, in the last attempt, resumed from every epoch.

    exact_resume.py FOLDER KILLS     KILLS is JSON: [[epoch, step, rank], ...]

Every attempt builds its objects from another seed, so that what is equal in the end came from the
checkpoints. Each rank writes what its runs ended in to FOLDER/rank-<n>.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from exact_job import EPOCHS, Trained, train
from killing import Kill, Killer

import torchrelay
from torchrelay import Context, Job, JobRunner, data_parallel, max_epochs
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.training.exit import run_and_leave


def main() -> None:
    """Play all runs of this world size."""
    folder = Path(sys.argv[1])
    schedule = tuple(Kill(*one) for one in json.loads(sys.argv[2]))
    session = torchrelay.init()
    attempt = session.env.restart_count
    found: dict[str, Trained] = {}
    found["killed"] = train(
        session, folder / "killed", seed=5 + attempt, killer=Killer(folder / "kills", schedule)
    )
    found |= every_resume(session, folder, "whole")
    if session.peers.size == 2:
        own = {"all_buffers": True, "ddp": {"broadcast_buffers": False}}
        found |= every_resume(session, folder, "own buffers", **own)
        train_large_weights(folder / "large")
    for epochs in (EPOCHS - 1, EPOCHS):  # a larger limit: the branch of the first call could go on
        found[f"rewound to {epochs}"] = train(
            session, folder / "whole from 2", seed=300 + epochs, epochs=epochs, resume_from_epoch=2
        )
    told = {name: asdict(trained) for name, trained in found.items()}
    (folder / f"rank-{session.env.rank}.json").write_text(json.dumps({"attempt": attempt, "runs": told}))


def train_large_weights(run_dir: Path) -> None:
    """One epoch of weights that are large enough to be divided between the ranks that write them."""
    torchrelay.seed(5)
    model = torch.nn.Linear(1024, 1024)
    trained = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job("large", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def learn(ctx: Context) -> None:
        trained(torch.rand(4, 1024)).square().mean().backward()
        optimizer.step()

    job.stop_when(max_epochs(1))
    JobRunner(job, run_dir).train()


def every_resume(session: SessionBase, folder: Path, name: str, **options: object) -> dict[str, Trained]:
    """An uninterrupted run, and one resumed from each of its epochs in a copy of its directory."""
    found = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found[name] = train(session, folder / name, seed=5, **options)
    told = [str(one.message) for one in said if "between nodes: saved" in str(one.message)]
    (folder / f"{name}.warnings-{session.env.rank}.json").write_text(json.dumps(told))
    for epoch in range(EPOCHS + 1):
        copy = folder / f"{name} from {epoch}"
        if session.env.rank == 0:
            shutil.copytree(folder / name, copy)
        session.peers.exchange("copied", epoch)
        found[copy.name] = train(session, copy, seed=100 + epoch, resume_from_epoch=epoch, **options)
    return found


if __name__ == "__main__":
    run_and_leave(main)
