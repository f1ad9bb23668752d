"""A metric that an epoch did not log is no value of that epoch: gaps, early stopping, the best epoch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import warned

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, RunResult, early_stopping, max_epochs, open_checkpoint
from torchrelay.__main__ import main
from torchrelay.metadata.experiments import metric_rows

ACC = ("val/acc", "max")
GAPS = {2: 0.9, 4: 0.5, 6: 0.8, 8: 0.4}


def train(
    where: Path,
    values: Mapping[int, float],
    *conditions: Any,
    epochs: int = 8,
    seen: Callable[[Any], None] = lambda ctx: None,
    nodes: list[str] | None = None,
    **options: Any,
) -> RunResult:
    """One start of a program whose epochs log `train/loss` always and `val/acc` where there are `values`."""
    job = Job("measured", blobs=dict(w=lambda ctx: torch.zeros(2)))

    @job.epoch
    def step(ctx: Any) -> None:
        seen(ctx)
        ctx["w"].add_(1)
        ctx.log("train/loss", 1 / ctx.epoch)
        if ctx.epoch in values:
            ctx.log("val/acc", values[ctx.epoch])

    job.stop_when(max_epochs(epochs), *conditions)
    with LocalSession(nodes) as session:
        return JobRunner(job, where, code=False, **{"best": ACC, **options}).train(session)


def kept(run: Path) -> list[int]:
    return sorted(int(one.name[1:9]) for one in (run / "checkpoints/data").iterdir())


def test_early_stopping_waits_for_the_first_measurement(tmp_path: Path) -> None:
    """A metric of every second epoch ends no run by not being there yet, and the run ends as it should."""
    rising = {epoch: float(epoch) for epoch in GAPS}
    result = train(tmp_path, rising, early_stopping("val/acc", mode="max", patience=3))
    assert (result, result.status, result.stop) == (8, "FINISHED", ("8 epochs are done",))


@pytest.mark.parametrize(
    ("values", "patience", "last"),
    [
        ({1: 0.1, 3: 0.5, 6: 0.4, 9: 0.6, 12: 0.7}, 3, 12),
        ({1: 0.1, 5: 0.5, 9: 0.9}, 3, 12),
        ({2: 0.9, 4: 0.5, 6: 0.8, 8: 0.4, 10: 0.3}, 3, 8),
        ({3: 0.9, 6: 0.9, 12: 1.0}, 1, 6),
        ({2: math.nan, 4: math.nan}, 2, 4),
    ],
)
def test_patience_counts_measurements(
    tmp_path: Path, values: dict[int, float], patience: int, last: int
) -> None:
    """Epochs without one are not counted, however many; NaN is a measurement, and no better one."""
    condition = early_stopping("val/acc", mode="max", patience=patience)
    result = train(tmp_path, values, condition, epochs=12)
    assert result == last
    assert (last == 12) or f"for {patience} epochs that logged it" in result.stop[0]


def test_a_resume_in_a_gap_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Started anew at every epoch, metrics, patience and what tasks see of metrics are those of one start."""

    def story(name: str, starts: list[int]) -> tuple[list[Any], RunResult]:
        told: list[Any] = []

        def seen(ctx: Any) -> None:
            told.append((ctx.epoch, dict(ctx.metrics), dict(ctx.measured)))

        for epochs in starts:
            condition = early_stopping("val/acc", mode="max", patience=3)
            result = train(tmp_path / name, GAPS, condition, epochs=epochs, seen=seen)
        return told, result

    whole, parts = story("whole", [12]), story("parts", list(range(1, 13)))
    assert whole[0] == parts[0] and whole[0][3] == (4, {"train/loss": 1 / 3, "val/acc": 0.9}, {})
    assert whole[1] == parts[1] == 8 and whole[1].metrics == parts[1].metrics
    assert whole[1].metrics == {"train/loss": 1 / 8, "val/acc": 0.4}


def test_the_best_epoch_is_one_that_was_measured(tmp_path: Path) -> None:
    """`keep_best`, `best` and `prune` never take an epoch for another's value; two of two are kept."""
    train(tmp_path, GAPS, keep_best=(*ACC, 2), keep_last=1)
    assert kept(tmp_path) == [2, 6, 8]
    assert open_checkpoint(tmp_path, "best").epoch == 2
    assert open_checkpoint(tmp_path, "best", best=("val/acc", "min")).epoch == 8


def test_prune_ignores_gaps(tmp_path: Path) -> None:
    """Retention on demand keeps the epochs that were measured best."""
    train(tmp_path, GAPS)
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--keep-best", "val/acc:max:2"]) == 0
    assert kept(tmp_path) == [2, 6, 8]


def test_lists_trackers_and_rows_have_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls`, `open_checkpoint`, the CSV file and rows show a value where there was one."""
    train(tmp_path, GAPS, trackers=["csv"])
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["epochs"]
    assert {one["epoch"]: one["metrics"]["val/acc"] for one in listed if "val/acc" in one["metrics"]} == GAPS
    assert [one["epoch"] for one in listed if "train/loss" in one["metrics"]] == list(range(1, 9))
    assert dict(open_checkpoint(tmp_path, 3).metrics) == {"train/loss": 1 / 3}
    assert metric_rows(tmp_path, "val") == [{"epoch": epoch, "acc": value} for epoch, value in GAPS.items()]
    rows = csv.DictReader((tmp_path / "trackers/metrics.csv").read_text().splitlines())
    assert [int(row["epoch"]) for row in rows if row["val/acc"]] == list(GAPS)


class Every(torchrelay.Program):
    """Validates in every second epoch."""

    max_epochs = 8
    validate_every = 2
    best = ("val/accuracy", "max")

    def make_data(self) -> Any:
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        return {"train": (x[:40], y[:40]), "val": (x[40:], y[40:])}

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 2)

    def stop_conditions(self) -> Any:
        return [early_stopping("val/loss", patience=3)]


def test_a_program_that_validates_now_and_then_trains_to_its_end(tmp_path: Path) -> None:
    """In a directory and in memory alike, and its rows are the epochs that were validated."""
    for where in (tmp_path / "run", None):
        program = Every()
        assert program.train(where) == 8
        assert [row["epoch"] for row in program.rows("val")] == [2, 4, 6, 8]
        assert len(program.rows("train")) == 8


def texts_of(work: Callable[[], Any]) -> list[str]:
    with warned() as texts:
        work()
    return [one for one in texts if "stop condition" in one]


@pytest.mark.parametrize("nodes", [None, ["a", "b"]])
def test_a_condition_whose_metric_never_comes_is_warned_of_once(
    tmp_path: Path, nodes: list[str] | None
) -> None:
    """After the third epoch or at the end, on one node or several; the run trains to its end."""
    text = (
        "the stop condition early_stopping(score) waits for the metric 'score', which no epoch has logged; "
        "available: 'train/loss'"
    )
    condition = early_stopping("score", mode="max")
    assert texts_of(lambda: train(tmp_path / "three", {}, condition, epochs=3, nodes=nodes)) == [text]
    condition = early_stopping("score", mode="max")
    assert texts_of(lambda: train(tmp_path / "one", {}, condition, epochs=1, nodes=nodes)) == [text]


def test_a_misspelt_metric_is_warned_of_in_the_first_epoch_that_logs_a_similar_one(tmp_path: Path) -> None:
    """For a stop condition and for `best`; a name that comes later is not misspelt."""
    with warned() as texts:
        train(tmp_path / "run", GAPS, early_stopping("val/acd"), best=("val/acb", "max"))
    assert [text for text in texts if "no epoch has logged" in text] == [
        "the stop condition early_stopping(val/acd) waits for the metric 'val/acd', which no epoch has "
        "logged; did you mean 'val/acc'?",
        "best= names the metric 'val/acb', which no epoch has logged; did you mean 'val/acc'?",
    ]
    with warned() as texts:
        train(tmp_path / "later", GAPS, early_stopping("val/acc"), best=("val/acc", "max"))
    assert not [text for text in texts if "no epoch has logged" in text]


def test_a_metric_that_has_come_is_waited_for_in_silence(tmp_path: Path) -> None:
    """One measurement in the first epochs is enough: later gaps are the program's."""
    assert texts_of(lambda: train(tmp_path, {2: 0.5}, early_stopping("val/acc"))) == []


@pytest.mark.parametrize(
    "condition", [lambda ctx: ctx.metric("val/acc") > 0.85, lambda ctx: ctx.metrics["val/acc"] > 0.85]
)
def test_functions_as_conditions_wait_too(tmp_path: Path, condition: Callable[[Any], bool]) -> None:
    """What asks for a metric that is not there yet says no stop; in a task it is an error, as ever."""
    result = train(tmp_path / "run", {4: 0.9}, condition)
    assert result == 4 and "says so" in result.stop[0]
    with pytest.raises(
        torchrelay.RelayError, match=r"no metric 'val/acc' was reduced yet; there are: train/loss"
    ):
        train(tmp_path / "task", {4: 0.9}, seen=lambda ctx: ctx.epoch == 2 and ctx.metric("val/acc"))


def test_an_epoch_without_values_may_still_be_trained_on(tmp_path: Path) -> None:
    """Retention without any value keeps all and warns after the third epoch, not before."""
    for epochs, warns in ((2, False), (4, True)):
        with warned() as texts:
            train(tmp_path / str(epochs), {}, epochs=epochs, keep_best=ACC, keep_last=1)
        assert any("no epoch has a finite value" in one for one in texts) is warns
        assert kept(tmp_path / str(epochs)) == list(range(epochs + 1))
