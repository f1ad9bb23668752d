"""`ctx.log(..., every=n)`: curves within epochs, in the run's own files, trackers and the report."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import clean_environment
from warm import PLACE, server, warmed

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.session.run_state import Row, StepPoints
from torchrelay.tools.cli.main import main

SRC = Path(__file__).resolve().parent.parent.parent / "src"
PROGRAM = """
import os, signal, sys, torch, torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.runners.session import run_state as step_points

step_points.EVERY_SECS = 0.0  # so that all that has come lies in the files when the process is killed
die, save, rewind = map(int, sys.argv[1:4])
torchrelay.seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torchrelay.EpochLoader(torch.utils.data.TensorDataset(torch.randn(100, 4)), batch_size=4)
job = Job("steps", blobs=dict(model=model, optimizer=optimizer, data=data))

@job.epoch
def train(ctx):
    for (x,) in ctx.steps(data):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        ctx.log("train/loss", loss, every=10)
        ctx.log("train/step", ctx.total_steps, reduce="last", every=7)
        if ctx.total_steps == save:
            signal.raise_signal(signal.SIGUSR2)  # to this thread: its handler runs in this step
        if ctx.total_steps == die:
            os.kill(os.getpid(), signal.SIGKILL)

job.stop_when(max_epochs(3))
runner = JobRunner(job, "run", best=None, trackers=["csv", "jsonl", "tensorboard"])
runner.train(resume_from_epoch=None if rewind < 0 else rewind)
"""
ENDS = [7, 10, 14, 20, 21, 25, 28, 30, 35, 40, 42, 49, 50, 56, 60, 63, 70, 75]
"""Of three epochs of 25 steps: multiples of 7 and 10, and the last step of each epoch."""


def start(folder: Path, die: int = 0, save: int = 0, rewind: int = -1) -> None:
    """One start of the program, killed at a step where that is asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        warmed(["train.py", str(die), str(save), str(rewind)]),
        cwd=folder,
        env=clean_environment({"PYTHONPATH": str(SRC), PLACE: server()}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if die else 0), done.stderr


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points by metric, which the run's own files and all trackers tell alike."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in RunDirectory(folder / "run").steps():
        for name, value in line["metrics"].items():
            found.setdefault(name, []).append((line["step"], value))
    told: dict[str, list[tuple[int, float]]] = {}
    for text in (folder / "run/trackers/metrics.steps.jsonl").read_text().splitlines():
        row = json.loads(text)
        for name, value in row["metrics"].items():
            told.setdefault(name, []).append((row["step"], value))
    assert told == found
    told = {}
    with (folder / "run/trackers/metrics.steps.csv").open() as file:
        for row in csv.DictReader(file):
            told.setdefault(row["metric"], []).append((int(row["step"]), float(row["value"])))
    assert told == found
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return found
    events = EventAccumulator(str(folder / "run/trackers/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name, points in found.items():
        shown = [(one.step, one.value) for one in events.Scalars(f"{name}_step")]
        assert shown == [(step, pytest.approx(value)) for step, value in points]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float]]]:
    """The points of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder)
    return curves(folder)


def test_points_lie_where_intervals_and_epochs_end(undisturbed: Any) -> None:
    """A window ends at multiples of its interval and at the end of an epoch; `last` is the value there."""
    assert sorted({step for points in undisturbed.values() for step, _ in points}) == ENDS
    assert all(step == value for step, value in undisturbed["train/step"])
    assert [step for step, _ in undisturbed["train/loss"]] == [10, 20, 25, 30, 40, 50, 60, 70, 75]


def test_a_killed_run_has_the_points_of_an_undisturbed_one(tmp_path: Path, undisturbed: Any) -> None:
    """Steps logged before SIGKILL in mid-epoch and run again appear once, with the same values."""
    start(tmp_path, die=44)
    before = [line["step"] for line in RunDirectory(tmp_path / "run").steps()]
    assert before[-1] == 42
    start(tmp_path)
    assert curves(tmp_path) == undisturbed


def test_a_run_that_goes_on_inside_an_epoch_continues_its_curves(tmp_path: Path, undisturbed: Any) -> None:
    """From a position inside an epoch the curves go on; a window that was saved there is cut there, once."""
    start(tmp_path, die=48, save=33)
    start(tmp_path)
    found = curves(tmp_path)
    for name, points in undisturbed.items():
        steps = [step for step, _ in found[name]]
        assert steps == sorted({*(step for step, _ in points), 33})
        assert [one for one in found[name] if one[0] not in (33, 40)] == [
            one for one in points if one[0] != 40
        ]


def test_a_rewind_takes_back_the_points_of_the_abandoned_branch(tmp_path: Path, undisturbed: Any) -> None:
    """Also where the start that rewinds is killed before its first point: nothing abandoned is shown."""
    start(tmp_path)
    start(tmp_path, die=26, rewind=1)
    assert [line["step"] for line in RunDirectory(tmp_path / "run").steps()] == [7, 10, 14, 20, 21, 25]
    start(tmp_path)
    assert curves(tmp_path) == undisturbed


def test_the_report_draws_them_by_step(tmp_path: Path) -> None:
    """The page has a chart by step of each metric that has points."""
    start(tmp_path)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(page), "--no-norms"]) == 0
    text = page.read_text()
    assert "train/loss over steps" in text
    assert 'data-unit="step"' in text
    assert ">by step<" in text


def logged(steps: int, **given: Any) -> None:
    """Train an epoch that logs in each of its steps, none where there are none."""
    job = Job("logs", blobs={"w": torch.zeros(1)})

    @job.epoch
    def train(ctx: torchrelay.Context) -> None:
        for _ in ctx.steps(range(steps)) if steps else [0]:
            ctx.log("loss", 1.0, **given)

    job.stop_when(max_epochs(1))
    with LocalSession() as session:
        JobRunner(job).train(session)


@pytest.mark.parametrize(
    ("steps", "every", "says"),
    [
        (3, 0, "number of steps"),
        (3, True, "number of steps"),
        (3, "10", "number of steps"),
        (0, 5, "ctx.steps"),
    ],
)
def test_intervals_that_cannot_be_are_refused(steps: int, every: Any, says: str) -> None:
    """What is no number of steps, and an interval where no step is counted, is refused with the remedy."""
    with pytest.raises(UsageError, match=says):
        logged(steps, every=every)
    logged(3, every=2)


class _Late:
    """A value that is on its way: reading it is an error until it has come."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.come = True


def test_nobody_waits_for_a_device_while_the_epoch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point whose value has not come, and those behind it, are handed over later; the end waits for all."""
    late: list[_Late] = []

    def to_host(numbers: tuple[Any, Any]) -> tuple[tuple[Any, Any], _Late]:
        late.append(_Late())
        return (2.5, 1.0), late[-1]

    monkeypatch.setattr("torchrelay.runners.session.metrics.to_host", to_host)
    monkeypatch.setattr("torchrelay.runners.session.run_state.EVERY_SECS", 0.0)
    points, told = StepPoints(), list[Row]()
    points.deliver = told.extend

    class Running:
        reduce, value, weight = "last", _Late(), 1.0

        @classmethod
        def of(cls, reduce: str) -> Running:
            return cls()

        def add(self, value: object, weight: object) -> None:
            pass

    monkeypatch.setattr("torchrelay.runners.session.run_state.Accumulator", Running)
    for step in range(1, 7):
        points.add(1, step, "loss", "last", 2, 1.0, 1.0)
    assert told == []
    assert len(late) == 2
    late[1].come = True
    points.hand_over()
    assert told == []
    late[0].come = True
    points.hand_over()
    assert [step for _, step, _ in told] == [2, 4]
    points.end(1, 6)
    assert [step for _, step, _ in told] == [2, 4, 6]
