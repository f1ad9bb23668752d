"""TensorBoard, MLflow and W&B, read back by what reads them: after a rewind there is one curve.

TensorBoard is there in CI. MLflow and W&B want the extra `test-trackers`: skipped without.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from torchrelay.metadata.sinks.text import TrackedRun
from torchrelay.metadata.sinks.trackers import sinks_of

STORY = {1: 1.0, 2: 0.5, 3: 3.0, 4: 4.0}
"""Epochs 1 to 5 give 1/epoch; the run goes back to 2, and epochs 3 and 4 give these."""
CURVE = {epoch * 10: value for epoch, value in STORY.items()}


def tell(name: str, run: TrackedRun, *, close: bool) -> None:
    """Two attempts: five epochs, then a rewind to the second and two epochs; the first one may just die."""
    (first,) = sinks_of([name])
    first.open(run, 0)
    first.rewind(0, 0)
    for epoch in range(1, 6):
        first.log(epoch, epoch * 10, {"train/loss": 1 / epoch, "odd@name": math.nan})
    if close:
        first.close()
    (second,) = sinks_of([name])
    second.open(run, 1)
    second.rewind(2, 20)
    for epoch in (3, 4):
        second.log(epoch, epoch * 10, {"train/loss": float(epoch)})
    second.close()


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(tmp_path / "run", "run", "job", "0123456789abcdef" * 2)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_tensorboard_shows_one_curve(run: TrackedRun, close: bool) -> None:
    """TensorBoard's own reader finds each step once, with the value of the attempt that counts."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell("tensorboard", run, close=close)
    events = EventAccumulator(str(run.trackers / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == list(CURVE.items())
    assert [(event.step, event.value) for event in events.Scalars("epoch")] == [
        (epoch * 10, epoch) for epoch in STORY
    ]


def test_tensorboard_counts_epochs_where_there_are_no_steps(run: TrackedRun) -> None:
    """A job without counted steps has the epoch as its axis, and is rewound by it."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = sinks_of(["tensorboard"])
    sink.open(run, 0)
    for epoch in (1, 2, 3):
        sink.log(epoch, 0, {"loss": float(epoch)})
    sink.rewind(2, 0)
    sink.log(3, 0, {"loss": 9.0})
    sink.close()
    events = EventAccumulator(str(run.trackers / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 9.0)]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_mlflow_shows_one_curve(
    run: TrackedRun, close: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's API tells one living run, of the last attempt, each step once; the old one is in the bin."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    pytest.importorskip("mlflow", reason="pip install -e '.[test-trackers]'")
    pytest.importorskip("sqlalchemy", reason="pip install -e '.[test-trackers]'")
    from mlflow.entities import ViewType
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/runs.db"
    tell(f"mlflow:{uri}", run, close=close)
    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "job"]
    (living,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(living.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == list(CURVE.items())
    assert living.data.tags["attempt"] == "1" and living.info.status == "FINISHED"
    assert living.info.run_name == "run"
    deleted = client.search_runs([experiment.experiment_id], run_view_type=ViewType.DELETED_ONLY)
    assert len(deleted) == 1
    assert not math.isfinite(living.data.metrics["odd_name"]) or living.data.metrics["odd_name"] == 0


@pytest.mark.filterwarnings("ignore")  # W&B's own
@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_wandb_shows_one_curve(run: TrackedRun, close: bool, capfd: Any) -> None:
    """Offline there is one file to send, whose steps increase; nothing complains of a step."""
    pytest.importorskip("wandb", reason="pip install -e '.[test-trackers]'")
    from wandb_files import awaited

    tell("wandb", run, close=close)
    (file,) = (run.trackers / "wandb").glob("wandb/offline-run-*/*.wandb")
    rows = awaited(file, len(CURVE))
    assert {row["_step"]: row["train/loss"] for row in rows} == CURVE
    assert [row["_step"] for row in rows] == sorted(CURVE)
    assert [row["epoch"] for row in rows] == list(STORY)
    out, err = capfd.readouterr()
    assert "step" not in out + err
