"""Trackers of real runs: one curve after kills and rewinds, and a tracker that fails costs nothing else."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, TrackedRun, max_epochs
from torchrelay.errors import UsageError
from torchrelay.metadata.sinks.text import CsvSink, JsonlSink
from torchrelay.metadata.sinks.trackers import sinks_of
from torchrelay.runners.training.journal import SaveWarning

PROGRAM = Path(__file__).resolve().parent.parent / "programs/watched.py"


def job(epochs: int, values: Mapping[int, float] | None = None, sign: float = 1.0) -> Job:
    """Logs its epoch's number, or `sign` times it in epochs that are run again."""
    made = Job("tracked", blobs=dict(state=[0]))
    made.epoch(lambda ctx: ctx.log("val", sign * ctx.epoch))
    made.stop_when(max_epochs(epochs))
    return made


def curve(run: Path) -> dict[int, float]:
    """What the CSV file of a run holds; the JSONL file must hold the same."""
    sheet, lines = CsvSink(run / "trackers/metrics.csv"), JsonlSink(run / "trackers/metrics.jsonl")
    found = {epoch: row["val"] for epoch, row in sheet.rows().items()}
    assert found == {row["epoch"]: row["metrics"]["val"] for row in lines.rows()}
    text = (run / "trackers/metrics.csv").read_text().splitlines()
    assert len(text) == 1 + len(found), "an epoch is there twice"
    return found


class Own:
    """A user's sink: writes down how it is called, and fails where it is told to."""

    def __init__(self, *failing: str, first: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing, self.first = failing, first

    def _called(self, verb: str, *given: Any) -> None:
        self.calls.append((verb, *given))
        random.seed(1)
        np.random.seed(1)
        if verb in self.failing and len(self.calls) > self.first:
            raise ConnectionError("no tracker today\nand a page of reasons")

    def open(self, run: TrackedRun, attempt: int) -> None:
        self._called("open", run.name, run.job, len(run.uuid), attempt)

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", epoch, step, dict(metrics))

    def rewind(self, epoch: int, step: int) -> None:
        self._called("rewind", epoch, step)

    def close(self) -> None:
        self._called("close")


def train(run: Path, made: Job, *trackers: Any, **options: Any) -> Any:
    return JobRunner(made, run, best=None, trackers=trackers).train(**options)


def test_a_run_that_goes_on_and_back_has_one_curve(tmp_path: Path) -> None:
    """After more epochs, a rewind to epoch 2 and other values from there, each epoch is there once."""
    run = tmp_path / "run"
    train(run, job(3), "csv", "jsonl")
    train(run, job(5), "csv", "jsonl")
    assert curve(run) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    train(run, job(4, sign=-1), "csv", "jsonl", resume_from_epoch=2)
    assert curve(run) == {1: 1, 2: 2, 3: -3, 4: -4}
    JobRunner(job(1), run, best=None, resume="never", trackers=["csv", "jsonl"]).train()
    assert curve(run) == {1: 1}


def test_what_a_sink_is_told(tmp_path: Path) -> None:
    """Opened with the attempt, rewound to where the run goes on, told each epoch once, closed; on rank 0."""
    first, second = Own(), Own()
    train(tmp_path / "run", job(2), first)
    train(tmp_path / "run", job(3), second)
    assert first.calls == [
        ("open", "run", "tracked", 32, 0),
        ("rewind", 0, 0),
        *(("log", epoch, 0, {"val": float(epoch)}) for epoch in (1, 2)),
        ("close",),
    ]
    assert second.calls == [
        ("open", "run", "tracked", 32, 1), ("rewind", 2, 0), ("log", 3, 0, {"val": 3.0}), ("close",),
    ]  # fmt: skip


def test_a_killed_program_has_one_curve(tmp_path: Path) -> None:
    """A process that is killed in its second epoch and started again leaves each epoch once."""
    command = warmed([str(PROGRAM), "run", "3", "0"])

    def start(*more: str) -> int:
        return subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env=clean_environment({PLACE: server()}),
            capture_output=True,
            timeout=100,
            check=False,
        ).returncode

    assert start("2") == -9
    assert start() == 0
    rows = JsonlSink(tmp_path / "run/trackers/metrics.jsonl").rows()
    assert [(row["epoch"], row["step"], row["attempt"]) for row in rows] == [(1, 3, 0), (2, 6, 1)]
    sheet = (tmp_path / "run/trackers/metrics.csv").read_text()
    assert sheet == "epoch,step,train/loss\n1,3,1.0\n2,6,0.5\n"


@pytest.mark.parametrize(
    ("sink", "said", "logged"),
    [
        (Own("open"), ["failed at open: ConnectionError: no tracker today; it is not used any more"], []),
        (Own("rewind"), ["failed at rewind"], []),
        (
            Own("log"),
            ["failed at log", "failed at log", "it is not used any more in this attempt"],
            [1, 2, 3],
        ),
        (Own("close"), ["failed at close"], [1, 2, 3, 4, 5]),
        (Own("log", "close"), ["at log", "at log", "it is not used any more"], [1, 2, 3]),
    ],
    ids=["open", "rewind", "log", "close", "all"],
)
def test_a_sink_that_fails_is_left_alone(
    sink: Own, said: list[str], logged: list[int], tmp_path: Path
) -> None:
    """Each failure is a warning of one line, the third in a row the last; training and the others go on."""
    with pytest.warns(SaveWarning) as warned:
        result = train(tmp_path / "run", job(5), sink, "csv", "jsonl")
    texts = [str(one.message) for one in warned]
    assert int(result) == 5 and curve(tmp_path / "run") == {epoch: epoch for epoch in range(1, 6)}
    assert len(texts) == len(said) and all(part in text for part, text in zip(said, texts, strict=True))
    assert not any("\n" in text for text in texts)
    assert [call[1] for call in sink.calls if call[0] == "log"] == logged


def test_a_sink_moves_no_random_stream(tmp_path: Path) -> None:
    """What a sink does to Python's and numpy's streams is undone: the training draws what it drew without."""

    def drawn(run: Path, *trackers: Any) -> list[float]:
        found: list[float] = []
        random.seed(7)
        np.random.seed(7)
        made = Job("drawing", blobs=dict(x=1))
        made.epoch(lambda ctx: found.extend((random.random(), float(np.random.random()))))
        made.stop_when(max_epochs(3))
        train(run, made, *trackers)
        return found

    assert drawn(tmp_path / "with", Own()) == drawn(tmp_path / "without")


def test_trackers_belong_to_a_run_directory(tmp_path: Path) -> None:
    """A manager alone has no place for them: that is said at once."""
    with pytest.raises(UsageError, match="need a run directory"):
        JobRunner(job(1), MultiNodeCheckpointManager(tmp_path), trackers=["csv"])


@pytest.mark.filterwarnings("ignore")  # of the trackers' own packages
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_other_trackers_of_a_real_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that resumes and rewinds with each of them is warned of nothing by us."""
    pytest.importorskip(name, reason="pip install -e '.[test-trackers]'")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    named = f"mlflow:sqlite:///{tmp_path}/runs.db" if name == "mlflow" else name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torchrelay.runners.training.journal.Journal.warn", lambda self, text: pytest.fail(text)
        )
        for epochs, back in ((2, None), (4, None), (3, 1)):
            train(tmp_path / "run", job(epochs), named, resume_from_epoch=back)
    assert len(sinks_of([named])) == 1
