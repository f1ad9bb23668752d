"""Mistakes that used to pass in silence."""

from __future__ import annotations

import shutil
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import warned
from torch.utils.data import DataLoader

from torchrelay import Checkpointer, Job, JobRunner, LocalSession, Run, early_stopping, max_epochs
from torchrelay.errors import BlobError, LeftByInterrupt, SaveFailedError, TaskFailedError


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
    with warned():
        JobRunner(job, tmp_path / "run").train(LocalSession())
    assert JobRunner(job_with(torch.optim.SGD, 2), tmp_path / "run").train(LocalSession()) == 2


def test_a_run_whose_last_epoch_is_not_saved_is_not_finished(tmp_path: Path) -> None:
    """The last epoch is tried once more; then the run fails, and the same command resumes when it can."""
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


@pytest.mark.parametrize("kept", ["nowhere", "as a blob", "in an object"])
def test_a_scheduler_that_is_not_saved_is_warned_of(tmp_path: Path, kept: str) -> None:
    """Its schedule would start over after a resume; an object that holds it may save it."""
    job = job_with(torch.optim.SGD, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(job.blobs["optimizer"].source, 1)
    if kept == "as a blob":
        job.blobs(scheduler=scheduler)
    elif kept == "in an object":
        job.blobs(held=Holder(scheduler))
    with warned() as texts:
        JobRunner(job, tmp_path / "run").train(LocalSession())
    expected = ["optimizer has a learning-rate scheduler that is not among the blobs"]
    assert [text.partition(":")[0] for text in texts] == (expected if kept == "nowhere" else [])
    blobs = {one.name: one.source for one in job.blobs}
    with warned() as texts, Checkpointer(tmp_path / "only", blobs) as checkpointer:
        checkpointer.save(1)
    assert [text.partition(":")[0] for text in texts] == (expected if kept == "nowhere" else [])


class Holder:
    """Saves a scheduler as its own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


def own_objects() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    return dict(model=model, optimizer=torch.optim.Adam(model.parameters()))


def trained(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.ones(1, 2)).sum().backward()
    objects["optimizer"].step()


@pytest.mark.parametrize("saving", ["Run", "Checkpointer"])
@pytest.mark.parametrize("event", ["built again", "trained in turn", "other shapes", "trained before"])
def test_objects_that_are_built_again_are_reported(tmp_path: Path, saving: str, event: str) -> None:
    """A warning once, after the second epoch; not for those that also step, differ, or stepped earlier."""
    registered, other = own_objects(), own_objects()
    if event == "other shapes":
        other["model"] = torch.nn.Linear(2, 1, bias=False)
        other["optimizer"] = torch.optim.Adam(other["model"].parameters())
    if event == "trained before":
        trained(other)
    with warned() as texts:
        saved = Run(tmp_path, registered) if saving == "Run" else Checkpointer(tmp_path, registered)
        with saved as one:
            for epoch in one.epochs(3) if isinstance(one, Run) else range(1, 4):
                if event != "trained before":
                    trained(other)
                if event == "trained in turn":
                    trained(registered)
                if isinstance(one, Checkpointer):
                    one.save(epoch)
    begin = "'optimizer' never stepped, but another optimizer"
    found = [text[: len(begin)] for text in texts if "never stepped" in text]
    assert found == ([begin] if event == "built again" else [])


def test_a_loader_of_torch_as_a_blob_names_the_one_that_can_be_saved(tmp_path: Path) -> None:
    """A DataLoader has no state; the message says what to register instead."""
    with (
        pytest.raises(BlobError, match=r"is a DataLoader, which has no state .* use an EpochLoader"),
        Run(tmp_path, dict(loader=DataLoader(torch.zeros(4)))) as run,
    ):
        list(run.epochs(1))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal; a process started in the background of a shell inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("event", ["Ctrl-C", "error"])
def test_a_loop_that_ends_early_shows_no_lines_of_torchrelay(
    tmp_path: Path, interruptible: None, event: str
) -> None:
    """The traceback has the lines of the program, and the last one says what happened."""
    with (
        pytest.raises((LeftByInterrupt, TaskFailedError)) as raised,
        Run(tmp_path, dict(w=torch.zeros(1))) as run,
    ):
        for _ in run.epochs(2):
            for _ in run.steps(range(2)):
                if event == "error":
                    raise ValueError("odd")
                signal.raise_signal(signal.SIGINT)
    text = "".join(traceback.format_exception(raised.value))
    assert text.splitlines()[-1].endswith(
        "ValueError: odd" if event == "error" else "the same command resumes"
    )
    assert len(raised.traceback) == 2 and "Interrupted" not in text.partition("LeftByInterrupt")[0]


def test_a_first_launch_logs_where_and_what_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line when the training begins, as typed; none in a resume, or where only warnings are logged."""
    monkeypatch.chdir(tmp_path)
    for folder, level, expected in (("a", "info", 1), ("a", "info", 0), ("b", "warning", 0)):
        monkeypatch.setenv("TORCHRELAY_LOG_LEVEL", level)
        with Run(f"runs/{folder}", dict(w=torch.zeros(1), best={"loss": 1.0})) as run:
            list(run.epochs(1))
        line = " I r0/1 new run runs/a on 1 rank saves best, w\n"
        assert capsys.readouterr().err.count(line) == expected


def test_early_stopping_says_why_the_run_has_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end and at a launch that trains nothing; a run that reaches its limit needs no reason."""
    reason = "loss did not improve on 1 for 2 epochs that logged it"
    for said in (f"finished at epoch 3: {reason}", f"already finished at epoch 3 ({reason}"):
        with Run(tmp_path, dict(w=torch.zeros(1)), stop_when=[early_stopping("loss", patience=2)]) as run:
            for _ in run.epochs(9):
                run.log("loss", 1.0)
        assert said in capsys.readouterr().err
    with Run(tmp_path / "whole", dict(w=torch.zeros(1))) as run:
        list(run.epochs(1))
    assert "finished" not in capsys.readouterr().err
