"""Faults of one rank of two: every rank shows them within 15 s and ends; nothing of them is committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import Finished, torchrun

PROGRAM = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, max_epochs

session = torchrelay.init(seed=0)
rank, what = session.env.rank, sys.argv[1]
odd = rank == 1
model = nn.Linear(3 if odd and what == "shape" else 2, 2)
blobs = {"model": model, "config": {"fn": [1]}}
if odd and what == "name":
    blobs["extra"] = nn.Linear(1, 1)
if odd and what == "unstorable":
    blobs["config"] = {"fn": [print]}
job = Job("ranks", blobs=blobs)

def make(ctx):
    if odd and what == "factory":
        raise KeyError("no such layer")
    return torch.zeros(1)

job.blobs(made=make)

@job.epoch
def train(ctx):
    print(f"rank {rank} epoch {ctx.epoch}", flush=True)
    if odd and ctx.epoch == 2:
        print(f"fault {time.time()}", flush=True)
        if what == "raise":
            raise ValueError("bad sample 17")
        if what == "replicas":
            with torch.no_grad():
                model.weight.add_(1)
        if what == "later":
            ctx["config"] = {"fn": [print]}
    dist.all_reduce(torch.ones(1), group=ctx.group)

job.stop_when(max_epochs(3))
JobRunner(job, "run", max_failed_saves=1).main()
"""

pytestmark = pytest.mark.ranks


def start(tmp_path: Path, what: str) -> Finished:
    return torchrun(PROGRAM, what, warm=True, ranks=2, cwd=tmp_path, timeout_secs=60)


def status(tmp_path: Path) -> dict[str, object]:
    return dict(json.loads((tmp_path / "run" / "status.json").read_text()))


def committed(tmp_path: Path) -> set[str]:
    return {path.name[:9] for path in (tmp_path / "run" / "checkpoints" / "data").iterdir()}


def test_a_task_that_raises_on_one_rank(tmp_path: Path) -> None:
    """Both ranks show rank, task and traceback, and end within 15 s; status.json says FAILED and why."""
    done = start(tmp_path, "raise")
    assert done.rc == 1
    began = float(next(line for line in done.out.splitlines() if "fault " in line).split("fault ")[1])
    assert done.ended - began < 15
    for rank in (0, 1):
        text = done.of_rank(rank)
        assert "rank 1" in text and "ValueError: bad sample 17" in text, f"{rank}: {done}"
    found = status(tmp_path)
    assert found["state"] == "FAILED" and "bad sample 17" in str(found["error"]), found
    assert committed(tmp_path) == {"e00000000", "e00000001"}


def test_replicas_that_differ(tmp_path: Path) -> None:
    """Leaf and rank are named on all ranks, the save is no epoch, and the run ends with code 5."""
    done = start(tmp_path, "replicas")
    assert done.rc == 1, "torchrun's own code"
    for rank in (0, 1):
        text = done.of_rank(rank)
        assert "model.weight" in text and "trainer_1" in text, f"{rank}: {done}"
    found = status(tmp_path)
    assert (found["state"], found["exit_code"]) == ("FAILED", 5)
    assert committed(tmp_path) == {"e00000000", "e00000001"}


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("shape", 5, ("model.weight", "trainer_1")),
        ("later", 5, ("config.fn[0]", "rank 1")),
        ("factory", 1, ("no such layer",)),
        ("unstorable", 2, ("config.fn[0]", "rank 1")),
    ],
)
def test_ranks_that_are_not_alike(tmp_path: Path, what: str, code: int, words: tuple[str, ...]) -> None:
    """A module of another shape, a value or factory that fails on one rank: all ranks say so and end."""
    done = start(tmp_path, what)
    assert f"exitcode: {code})" in done.err.replace("exitcode  :", "exitcode:"), done
    for rank in (0, 1):
        text = done.of_rank(rank)
        for word in words:
            assert word in text, f"{rank}: no {word!r} in {done}"
    if what == "unstorable":
        assert not (tmp_path / "run").exists(), "it was found before anything was made"
    else:
        assert status(tmp_path)["state"] == "FAILED"


def test_a_blob_that_only_one_rank_has(tmp_path: Path) -> None:
    """That is no fault: it is saved as that rank's own, as the stages of a pipeline are."""
    done = start(tmp_path, "name")
    assert done.rc == 0, done
    assert committed(tmp_path) == {"e00000000", "e00000001", "e00000002", "e00000003"}
