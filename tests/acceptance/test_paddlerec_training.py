"""What a configuration says of a training beside its steps: validation, and how the learning rate changes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lifecycle_cases
import pytest
import torch
from torchrun import torchrun

import torchrelay
from torchrelay.errors import UnknownEpochError, UsageError, exit_code_of
from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.lifecycle import run_config
from torchrelay.runners.config_runs.selection import config_file

VALIDATED = lifecycle_cases.CONFIG.replace("dataset_name: d}", "dataset_name: d, validation: VALIDATION}")


def run(folder: Path, *overrides: str, validation: str = "e") -> Any:
    return lifecycle_cases.run(folder, *overrides, text=VALIDATED.replace("VALIDATION", validation))


def rows(folder: Path, name: str) -> dict[int, float]:
    """The values of a metric by epoch, from the checkpoints."""
    found = {}
    for epoch in (1, 2, 3, 4):
        try:
            metrics = torchrelay.open_checkpoint(folder / "run", epoch).metrics
        except UnknownEpochError:
            continue
        if name in metrics:
            found[epoch] = metrics[name]
    return found


def test_a_phase_is_measured_on_other_data_while_it_trains(tmp_path: Path) -> None:
    """`validation` measures behind each epoch, in eval mode, exactly what `infer` measures of that epoch."""
    run(tmp_path)
    name = "infer1"
    measured = lifecycle_cases.run(
        tmp_path, "phase.a.dataset_name=e", "phase.a.validation=null", mode=[name]
    )[name]
    for metric in ("loss", "bias", "rmse", "samples"):
        expected = {row["epoch"]: row[metric] for row in measured if row["epoch"] > 0}
        assert rows(tmp_path, f"val/{metric}") == pytest.approx(expected), metric
    assert set(rows(tmp_path, "loss")) == {1, 2}, "and what training logs stays"


def test_validation_has_an_interval_and_names_metrics(tmp_path: Path) -> None:
    """`every` and `metrics` say how often and what; the best epoch by such a metric is kept as best."""
    run(
        tmp_path, "runner.train1.epochs=4", "runner.train1.keep_last=1",
        "runner.train1.keep_best={metric: val/loss, mode: max}",
        validation="{dataset_name: e, every: 2, metrics: [loss, rmse]}",
    )  # fmt: skip
    best = torchrelay.open_checkpoint(tmp_path / "run", "best")
    assert best.epoch in (2, 4)
    val = {name for name in best.metrics if name.startswith("val/")}
    assert val == {"val/loss", "val/rmse"}


def test_validation_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    """With validation and without, the same weights come out, and a run goes on with it or without."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    run(tmp_path / "with", "runner.train1.epochs=1")
    run(tmp_path / "with", "phase.a.validation=null")
    lifecycle_cases.run(tmp_path / "without")
    loaded = [
        torchrelay.open_checkpoint(tmp_path / name / "run").load_tensors("a.model.*")
        for name in ("with", "without")
    ]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(one, loaded[1][name]) for name, one in loaded[0].items())


@pytest.mark.parametrize(
    ("validation", "told"),
    [
        ("nothing", "unknown dataset `nothing`"),
        ("{every: 2}", "`dataset_name` missing"),
        ("{dataset_name: e, every: 0}", "every"),
        ("{dataset_name: e, metric: loss}", "metrics"),
    ],
)
def test_mistakes_of_a_validation_are_told_by_check(tmp_path: Path, validation: str, told: str) -> None:
    """Before anything runs, with the place."""
    path = lifecycle_cases.written(tmp_path, VALIDATED.replace("VALIDATION", validation))
    with pytest.raises(ConfigError, match=told):
        load_config(path)


def test_a_metric_that_the_model_does_not_give_is_refused(tmp_path: Path) -> None:
    """The first measurement tells it with the nearest name."""
    with pytest.raises(Exception, match="the model has no metric `rsme`; did you mean `rmse`"):
        run(tmp_path, validation="{dataset_name: e, metrics: rsme}")


@pytest.mark.ranks
def test_ranks_measure_together(tmp_path: Path) -> None:
    """Two ranks share the held-out data: the metrics are those of one process over the same weights."""
    lifecycle_cases.written(tmp_path, VALIDATED.replace("VALIDATION", "e"))
    done = torchrun(
        Path("-m"), "torchrelay", "run", "-m", "config.yaml",
        warm=True, ranks=2, cwd=tmp_path, timeout_secs=100,
    )  # fmt: skip
    assert done.rc == 0, str(done)
    measured = lifecycle_cases.run(
        tmp_path, "phase.a.dataset_name=e", "phase.a.validation=null", mode=["infer1"]
    )["infer1"]
    for metric in ("loss", "bias", "rmse", "samples"):
        expected = {row["epoch"]: row[metric] for row in measured if row["epoch"] > 0}
        assert rows(tmp_path, f"val/{metric}") == pytest.approx(expected), metric


def last_rate(folder: Path) -> float:
    saved = torchrelay.open_checkpoint(folder / "run")
    return float(saved.value("a.optimizer.param_groups.0.lr"))


@pytest.mark.parametrize(
    ("keys", "rate"),
    [
        ("{class: sgd, learning_rate: 0.1, decay_steps: 2, decay_rate: 0.5}", 0.1 * 0.5**3),
        ("{class: sgd, learning_rate: 0.1, lr_scheduler: {class: ExponentialLR, gamma: 0.5}}", 0.1 * 0.5**6),
        (
            "{class: sgd, learning_rate: 0.1, lr_scheduler: {class: exponentiallr, gamma: 0.5, per: epoch}}",
            0.1 * 0.5**2,
        ),
    ],
)
def test_the_learning_rate_changes_as_the_configuration_says(tmp_path: Path, keys: str, rate: float) -> None:
    """Two epochs of three steps: by steps or epochs, and the same when they are done in two starts."""
    overrides = (f"hyper_parameters.optimizer={keys}",)
    lifecycle_cases.run(tmp_path, *overrides, "runner.train1.epochs=1")
    lifecycle_cases.run(tmp_path, *overrides)
    assert last_rate(tmp_path) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("{class: sgd, decay_steps: 2}", "`decay_rate` missing"),
        ("{class: sgd, decay_rate: 0.5, decay_steps: 1, lr_scheduler: {class: StepLR}}", "remove one"),
        ("{class: sgd, lr_scheduler: {gamma: 0.5}}", "`class` missing"),
    ],
)
def test_mistakes_of_a_schedule_are_told_by_check(tmp_path: Path, keys: str, told: str) -> None:
    """Keys that belong together or contradict, before anything runs."""
    with pytest.raises(ConfigError, match=told):
        load_config(lifecycle_cases.written(tmp_path), [f"hyper_parameters.optimizer={keys}"])


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("{class: ExponentialLRR, gamma: 0.5}", "no ExponentialLRR; did you mean `ExponentialLR`"),
        ("{class: StepLR}", "StepLR does not accept"),
        ("{class: ReduceLROnPlateau}", "needs a metric"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(tmp_path: Path, schedule: str, told: str) -> None:
    """With its key, when the parts are built."""
    keys = f"hyper_parameters.optimizer={{class: sgd, learning_rate: 0.1, lr_scheduler: {schedule}}}"
    path = lifecycle_cases.written(tmp_path)
    with pytest.raises(Exception, match=told) as refused:
        run_config(load_config(path, [keys]))
    assert isinstance(refused.value.__cause__ or refused.value, UsageError)


def test_a_schedule_that_is_too_short_is_told_with_its_phase(tmp_path: Path) -> None:
    """OneCycleLR of five steps in a run of six: a mistake of the configuration, in words."""
    keys = "{class: sgd, learning_rate: 0.1, lr_scheduler: {class: OneCycleLR, max_lr: 0.5, total_steps: 5}}"
    path = lifecycle_cases.written(tmp_path)
    with pytest.raises(
        Exception, match=r"phase\.a: its OneCycleLR cannot step further \(Tried to step 6"
    ) as refused:
        run_config(load_config(path, [f"hyper_parameters.optimizer={keys}"]))
    assert exit_code_of(refused.value) == 2 and torchrelay.open_checkpoint(tmp_path / "run").epoch == 1


def test_a_run_that_replaces_the_inference_files_of_another_says_so(tmp_path: Path) -> None:
    """A `save_inference_path` that two runs share is told by the second; a run that goes on says nothing."""
    words = ("runner.train1.save_inference_path=inference",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lifecycle_cases.run(tmp_path, *words, "runner.train1.epochs=1")
        lifecycle_cases.run(tmp_path, *words)
    with pytest.warns(UserWarning, match="this run replaces files of an earlier run"):
        lifecycle_cases.run(tmp_path, *words, "runner.train1.save_checkpoint_path=second")


def test_a_package_is_found_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-m models.small` is `models/small/config.yaml` here, wherever the command lies."""
    lifecycle_cases.written(tmp_path / "models" / "small")
    monkeypatch.chdir(tmp_path)
    assert config_file("models.small") == str(tmp_path / "models/small/config.yaml")
    assert load_config(config_file("models.small")).settings.runner[0].name == "train1"
