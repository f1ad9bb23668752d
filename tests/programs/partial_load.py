"""Run by torchrun: some blobs of a run of ranks, in a launch that has trained nothing.

partial_load.py <folder> train      trains a DDP model with optimizer and counters; writes how it ended
partial_load.py <folder> load       fills new objects from epoch 2 and compares, rank by rank
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs


def made(rank: int) -> dict[str, Any]:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "count": torch.zeros(2),
        "own": torch.full((2,), float(rank)),
    }


def job_of(blobs: dict[str, Any]) -> Job:
    job = Job("partial")
    own = blobs["own"]
    job.blobs.add(**{name: one for name, one in blobs.items() if name != "own"})
    job.blobs.add(own=own, scope="rank", reshard="by_rank")

    @job.epoch
    def train(ctx: Context) -> None:
        blobs["model"](torch.randn(4, 2)).square().sum().backward()
        blobs["optimizer"].step()
        blobs["optimizer"].zero_grad()
        blobs["count"].add_(1)
        own.mul_(2).add_(1)

    job.stop_when(max_epochs(3))
    return job


def state(blobs: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = blobs["model"].module, blobs["optimizer"]
    return {
        "model": {name: one.tolist() for name, one in model.state_dict().items()},
        "optimizer": [one["momentum_buffer"].tolist() for one in optimizer.state.values()],
        "count": blobs["count"].tolist(),
        "own": blobs["own"].tolist(),
    }


def load(runner: JobRunner, names: list[str], epoch: int, session: Any) -> tuple[bool, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = runner.load_blobs_from_checkpoints(names, epoch, session)
    return done, [str(one.message) for one in told]


def main(folder: Path, verb: str) -> None:
    session = torchrelay.init()
    rank = session.peers.rank
    blobs = made(rank)
    runner = JobRunner(job_of(blobs), folder / "run", code=False)
    note = folder / f"state{rank}.json"
    if verb == "train":
        runner.train(session)
        note.write_text(json.dumps(state(blobs)))
    else:
        fresh, then = state(blobs), json.loads(note.read_text())
        done, told = load(runner, ["model.0.*", "nowhere"], 3, session)
        assert not done and ("nowhere" in "".join(told)) == (rank == 0), told
        assert state(blobs) == fresh
        done, told = load(runner, ["model.0.*"], 3, session)
        assert done and not told, told
        assert state(blobs)["model"]["0.weight"] == then["model"]["0.weight"]
        assert state(blobs)["model"]["1.running_mean"] == fresh["model"]["1.running_mean"]
        assert load(runner, ["model", "optimizer", "count", "own"], 3, session) == (True, [])
        assert state(blobs) == then, (rank, state(blobs), then)
        assert load(runner, ["count"], 2, session) == (True, []) and blobs["count"].tolist() == [2, 2]
        assert load(runner, ["count"], 9, session)[0] is False
    print(f"rank {rank} {verb} ok", flush=True)
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
