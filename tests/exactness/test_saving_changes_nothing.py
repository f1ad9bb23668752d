"""A save only looks: state and random streams are after it what they were before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_job import OPTIMIZERS, Net, data
from state_hash import hash_of_node

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, LocalSession, max_epochs, open_checkpoint


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_by_hand_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Objects, random streams and even the identity of state tensors are the same after a save."""
    torchrelay.seed(3)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    loader = EpochLoader(data(), batch_size=16)
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    job = Job("saving", blobs=objects)

    @job.epoch
    def learn(ctx: Context) -> None:
        for x, y in ctx.steps(loader):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def look() -> tuple[object, ...]:
        tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
        return hash_of_node(objects), [(id(t), t.data_ptr()) for t in tensors], model.training

    job.stop_when(max_epochs(1))
    runner = JobRunner(job, tmp_path / "run")
    with LocalSession() as session:
        runner.train(session)
        before = look()
        runner.save_checkpoints(2, session)
        assert look() == before
    assert open_checkpoint(tmp_path / "run", epoch=2).load({"model": Net()})


def test_a_save_by_hand_makes_its_run_directory(tmp_path: Path) -> None:
    """Without any training before; the next run resumes from what was saved, and need not wait."""
    job = Job("by-hand")
    job.epoch(lambda: None)
    job.stop_when(max_epochs(3))
    runner = JobRunner(job, tmp_path / "run")
    with LocalSession() as session:
        session.workspace()["total"] = 7
        runner.save_checkpoints(2, session)
    assert open_checkpoint(tmp_path / "run").value("total") == 7
    with LocalSession() as session:
        assert JobRunner(job, tmp_path / "run").train(session) == 3
        assert session.workspace()["total"] == 7


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_never_stepped_stays_unstepped(tmp_path: Path, kind: str) -> None:
    """Epoch 0 holds no optimizer state, and a resume from it starts without any."""
    stepped_at_start: list[bool] = []

    def train(**how: int) -> str:
        torchrelay.seed(3)
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        job = Job("unstepped", blobs={"model": model, "optimizer": optimizer})

        @job.epoch
        def learn(ctx: Context) -> None:
            stepped_at_start.append(bool(optimizer.state))
            x, y = data()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        job.stop_when(max_epochs(1))
        with LocalSession() as session:
            JobRunner(job, tmp_path / "run").train(session, **how)
        return hash_of_node({"model": model, "optimizer": optimizer})

    whole = train()
    leaves = [leaf.name for leaf in open_checkpoint(tmp_path / "run", epoch=0).leaves]
    assert not [name for name in leaves if name.startswith("optimizer.state")]
    assert train(resume_from_epoch=0) == whole
    assert stepped_at_start == [False, False]
