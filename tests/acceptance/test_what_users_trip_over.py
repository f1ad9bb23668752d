"""Mistakes that used to pass in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import BlobError, SaveFailedError


def job_with(optimizer: type[torch.optim.Optimizer], epochs: int, **options: Any) -> Job:
    model = torch.nn.Linear(2, 1)
    job = Job("trips", blobs=dict(model=model, optimizer=optimizer(model.parameters(), lr=0.1, **options)))

    @job.epoch
    def train(ctx: Any) -> None:
        ctx["optimizer"].zero_grad()
        ctx["model"](torch.ones(1, 2)).sum().backward()
        ctx["optimizer"].step()

    job.stop_when(max_epochs(epochs))
    return job


@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.optim.Adam, torch.optim.SGD), (torch.optim.SGD, torch.optim.AdamW)]
)
def test_the_state_of_another_optimizer_is_refused(
    tmp_path: Path, saved: type[torch.optim.Optimizer], loaded: type[torch.optim.Optimizer]
) -> None:
    """A program that changed its optimizer cannot resume as if it had not."""
    JobRunner(job_with(saved, 1), tmp_path / "run").train(LocalSession())
    with pytest.raises(BlobError, match=f"optimizer is a {loaded.__name__} here.*another kind"):
        JobRunner(job_with(loaded, 2), tmp_path / "run").train(LocalSession())


def test_options_of_schedulers_are_no_other_kind(tmp_path: Path) -> None:
    """An optimizer whose scheduler is gone is still of the same kind."""
    job = job_with(torch.optim.SGD, 1)
    torch.optim.lr_scheduler.StepLR(job.blobs["optimizer"].source, 1)
    JobRunner(job, tmp_path / "run").train(LocalSession())
    assert JobRunner(job_with(torch.optim.SGD, 2), tmp_path / "run").train(LocalSession()) == 2


def test_a_run_whose_last_epoch_is_not_saved_is_not_finished(tmp_path: Path) -> None:
    """The last epoch is tried once more; then the run fails, and the same command goes on when it can."""
    job, run = job_with(torch.optim.SGD, 2), tmp_path / "run"

    @job.epoch
    def lose(ctx: Any) -> None:
        if ctx.epoch == 2:
            shutil.move(run / "checkpoints" / "data", tmp_path / "away")
            (run / "checkpoints" / "data").write_text("in the way")

    with (
        pytest.warns(UserWarning, match="epoch 2 was NOT saved"),
        pytest.raises(SaveFailedError, match="epoch 2"),
    ):
        JobRunner(job, run).train(LocalSession())
    (run / "checkpoints" / "data").unlink()
    shutil.move(tmp_path / "away", run / "checkpoints" / "data")
    result = JobRunner(job_with(torch.optim.SGD, 2), run).train(LocalSession())
    assert (result, result.committed) == (2, 2)


def test_a_job_without_blobs_is_told_that_nothing_is_kept(tmp_path: Path) -> None:
    """Checkpoints without a model are legal and surely not what was meant."""
    job = Job("empty")
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    with pytest.warns(UserWarning, match="nothing is registered"):
        JobRunner(job, tmp_path / "run").train(LocalSession())


def test_a_run_directory_with_other_things_in_it_is_told(tmp_path: Path) -> None:
    """A run that begins inside of a source tree, say, names what lies there."""
    (tmp_path / "setup.py").write_text("mine")
    with pytest.warns(UserWarning, match=r"already contains other files \(setup\.py\)"):
        JobRunner(job_with(torch.optim.SGD, 1), tmp_path).train(LocalSession())
