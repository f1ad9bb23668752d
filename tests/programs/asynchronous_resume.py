"""Run by torchrun: asynchronous saves on all ranks, compared on disk, and resumed from every epoch.

asynchronous_resume.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from tear_job import Trainee, torn, train

import torchrelay
from torchrelay import open_checkpoint
from torchrelay.checkpoint.save import pipeline, replicas
from torchrelay.errors import StorageError, UnknownEpochError
from torchrelay.runners.training.exit import run_and_leave

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
    one_rank_fails(folder / "fails", rank)
    replicas_differ(folder / "differ", rank)
    (folder / f"rank-{rank}").write_text("exact\n")


def one_rank_fails(run: Path, rank: int) -> None:
    """Rank 1 cannot write epoch 1 in the background: no rank commits it, all go on together."""
    write, failed = pipeline._write_node, []

    def fail(job: Any, *rest: Any) -> Any:
        if rank == 1 and job.position.epoch == 1:
            failed.append(1)
            raise StorageError("no space left")
        return write(job, *rest)

    pipeline._write_node = fail
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        truth = train(run, 2, asynchronous=True)
    pipeline._write_node = write
    assert failed == [1] * rank
    told = [str(one.message) for one in said if "NOT saved" in str(one.message)]
    assert len(told) == 1 - rank and all("rank 1: no space left" in text for text in told), told
    assert set(truth) == {1, 2}
    assert torn(run, 2, {name: value for name, value in truth[2].items() if "running" not in name}) == []
    try:
        open_checkpoint(run, epoch=1)
    except UnknownEpochError:
        return
    raise AssertionError("epoch 1 is committed")


def replicas_differ(run: Path, rank: int) -> None:
    """A difference between the samples is found behind the training, and fails the save on all ranks."""
    where: list[tuple[str, bool]] = []
    digests_of = replicas.digests_of

    def noted(leaves: Any, mode: replicas.Mode) -> Any:
        leaves = list(leaves)
        behind = threading.current_thread() is not threading.main_thread()
        where.extend((leaf.name, behind) for leaf in leaves if mode is replicas.Mode.WHOLE)
        return digests_of(leaves, mode)

    replicas.digests_of = noted
    trainee = Trainee(5)
    weight = trainee.model[3].weight.data
    right = float(weight[100, 7])
    weight[100, 7] += rank

    def repair(ctx: Any, trainee: Trainee) -> None:
        ctx.before_mutation()
        if not repaired:
            weight[100, 7] = right
        repaired.append(1)

    repaired: list[int] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        truth = train(run, 2, trainee=trainee, before_step=repair, asynchronous=True)
    replicas.digests_of = digests_of
    told = [str(one.message) for one in said if "NOT saved" in str(one.message)]
    assert len(told) == 1 - rank, told
    assert all("model.3.weight differs on trainer_1" in text and "epoch 0" in text for text in told), told
    assert {behind for name, behind in where if name == "model.3.weight"} == {True}
    assert ("average.3.weight", False) in where, "what anybody may write is hashed at the boundary"
    for epoch, content in truth.items():
        assert torn(run, epoch, {name: one for name, one in content.items() if "running" not in name}) == []


if __name__ == "__main__":
    run_and_leave(main)
