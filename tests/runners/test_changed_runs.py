"""A run whose program has changed between two starts: stop conditions, rewinds to where it ended."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

import torchrelay
from torchrelay import Job, JobRunner, early_stopping, max_epochs, open_checkpoint
from torchrelay.errors import TaskFailedError, UsageError
from torchrelay.jobs.stop import function_settings, made_with, verdict_holds
from torchrelay.runners.training.plan import RunResult

LOSSES = (5, 4, 6, 6, 6, 3, 3, 3, 3, 3)


def train(run: Path, *conditions: Any, epoch: int | None = None, fails: int = 0) -> RunResult:
    """Train up to nine epochs of a loss that gets no better from epoch 3 to 5."""
    job = Job("es", blobs={"w": torch.zeros(4)})

    @job.epoch
    def train(ctx: Any) -> None:
        ctx["w"].add_(1)
        ctx.log("val/loss", LOSSES[ctx.epoch - 1])
        ctx.log("val/acc", 0.1 * ctx.epoch)
        if ctx.epoch == fails:
            raise RuntimeError("cut")

    job.stop_when(max_epochs(9), *conditions)
    return JobRunner(job, run, code=False, best=None).train(resume_from_epoch=epoch)


def patience(n: int, **options: Any) -> Any:
    return early_stopping("val/loss", patience=n, **options)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that early stopping has ended after epoch 5."""
    result = train(tmp_path / "run", patience(3))
    assert (int(result), result.status) == (5, "FINISHED")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("conditions", "last"),
    [
        pytest.param([patience(3)], 5, id="the same: nothing to do"),
        pytest.param([patience(2)], 5, id="less patience: it would have ended sooner"),
        pytest.param([patience(4)], 9, id="more patience"),
        pytest.param([patience(3, min_delta=0.5)], 9, id="another threshold"),
        pytest.param([patience(3, mode="max")], 9, id="another direction: the waiting begins anew"),
        pytest.param([], 9, id="taken out"),
        pytest.param([early_stopping("val/acc", mode="max", patience=2)], 9, id="another one in its place"),
        pytest.param([patience(3), early_stopping("val/acc", mode="max")], 5, id="one added beside it"),
    ],
)
def test_a_run_that_was_stopped_resumes_when_what_ended_it_has_changed(
    stopped: Path, conditions: list[Any], last: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A verdict holds for the condition that gave it: with another one the run trains, and says why."""
    capfd.readouterr()
    assert int(train(stopped, *conditions)) == last
    said = capfd.readouterr().err
    assert ("continuing although val/loss did not improve on 4 for 3 epochs" in said) == (last != 5), said
    assert open_checkpoint(stopped)["w"][:1].item() == last


def test_a_condition_that_is_added_to_a_run_that_reached_its_limit(tmp_path: Path) -> None:
    """With more epochs and early stopping beside, a finished run trains until one of them ends it."""
    job = Job("es", blobs={"w": torch.zeros(4)})
    job.epoch(lambda ctx: ctx.log("val/loss", LOSSES[ctx.epoch - 1]))
    job.stop_when(max_epochs(3))
    JobRunner(job, tmp_path, code=False, best=None).train()
    assert int(train(tmp_path, patience(2))) == 8


def test_a_rewind_to_the_last_epoch_of_a_stopped_run_trains(stopped: Path) -> None:
    """Whoever asks for that epoch wants it trained on; a start after a crash there does so too."""
    with pytest.raises(TaskFailedError):
        train(stopped, patience(3), epoch=5, fails=6)
    assert int(train(stopped, patience(3))) == 9
    with pytest.raises(RuntimeError, match="cut"):
        train(stopped, patience(3), epoch=5, fails=6)
    assert int(train(stopped, patience(3), epoch=5)) == 9


@pytest.mark.parametrize("form", ["lambda", "closure", "default", "partial", "method", "global"])
def test_a_function_with_another_threshold_is_another_condition(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a function the code and the plain values that it uses are compared, wherever it takes them from."""

    class Below:
        def __init__(self, bound: float) -> None:
            self.bound = bound

        def reached(self, ctx: Any) -> bool:
            return bool(ctx.metrics["val/loss"] < self.bound)

    def condition(bound: float) -> Any:
        def below(ctx: Any, limit: float = bound) -> bool:
            return bool(ctx.metrics["val/loss"] < limit)

        def closed(ctx: Any) -> bool:
            return bool(ctx.metrics["val/loss"] < bound)

        def partly(limit: float, ctx: Any) -> bool:
            return bool(ctx.metrics["val/loss"] < limit)

        monkeypatch.setattr("test_changed_runs.BOUND", bound)
        forms: dict[str, Callable[..., Any]] = {
            "lambda": (lambda ctx: ctx.metrics["val/loss"] < 4.5)
            if bound == 4.5
            else (lambda ctx: ctx.metrics["val/loss"] < 3.5),
            "closure": closed,
            "default": below,
            "partial": functools.partial(partly, bound),
            "method": Below(bound).reached,
            "global": below_the_global,
        }
        return forms[form]

    assert int(train(tmp_path, condition(4.5))) == 2
    assert int(train(tmp_path, condition(4.5))) == 2, "the same one has said so already"
    assert int(train(tmp_path, condition(3.5))) == 6


BOUND = 0.0


def below_the_global(ctx: Any) -> bool:
    return bool(ctx.metrics["val/loss"] < BOUND)


def test_what_cannot_be_compared_holds() -> None:
    """Verdicts of older epochs, of other versions of Python, and of conditions without settings hold."""
    assert verdict_holds(patience(9), None)
    here = function_settings(below_the_global)
    assert here is not None and function_settings(len) is None
    job = Job("x")
    job.stop_when(below_the_global)
    condition = job.stop_conditions[0]
    assert made_with(condition) == here
    assert verdict_holds(condition, {**here, "python": "cpython-27", "code": "0"})
    assert not verdict_holds(condition, {**here, "code": "0"})
    json.dumps(here)


KINDS: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "one cycle": lambda o, n: lr_scheduler.OneCycleLR(o, 0.5, total_steps=n + 1),
    "polynomial": lambda o, n: lr_scheduler.PolynomialLR(o, total_iters=n),
    "steps": lambda o, n: lr_scheduler.MultiStepLR(o, [n // 2, n]),
    "restarts": lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n),
    "cyclic": lambda o, n: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=n),
    "function": lambda o, n: lr_scheduler.LambdaLR(o, lambda epoch: 1 - epoch / n),
    "one after another": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, n)], [2]
    ),
    "at once": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, n)]
    ),
}
Rates = list[tuple[float, float]]


def rates(run: Path, kind: str | None, epochs: int, horizon: int, lr: float = 0.1, **options: Any) -> Rates:
    """The rate and momentum with which each epoch of this start began."""
    torchrelay.seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = None if kind is None else KINDS[kind](optimizer, horizon)
    job = Job("rates", blobs={"model": model, "optimizer": optimizer})
    if scheduler is not None:
        job.blobs.add(scheduler=scheduler)
    seen: Rates = []

    @job.epoch
    def train() -> None:
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, code=False, best=None, **options).train()
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_with_another_horizon_is_built_from_the_program(tmp_path: Path, kind: str) -> None:
    """`from_program="scheduler"` trains on with the rates of a run that had that horizon from the start."""
    whole = rates(tmp_path / "whole", kind, 8, 8)
    rates(tmp_path / "run", kind, 4, 4)
    rest = rates(tmp_path / "run", kind, 6, 8, from_program="scheduler")
    again = rates(tmp_path / "run", kind, 8, 8, from_program="scheduler")  # nothing has changed since
    assert [*rest, *again] == whole[4:]


def test_without_it_one_line_says_what_the_old_horizon_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resume follows the saved horizon, and says what differs, what will happen, and what helps."""
    rates(tmp_path, "cosine", 4, 4)
    old = rates(tmp_path, "cosine", 6, 8)
    said = capfd.readouterr().err
    assert old[0][0] < old[1][0], "behind its horizon a cosine rises again"
    assert said.count("scheduler keeps its saved settings") == 1
    assert "T_max was 4 and is 8 in the program; the rate rises again after step 4" in said
    assert "from_program='scheduler' takes the program's" in said


def test_a_learning_rate_of_the_command_line_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`from_program="optimizer.lr"` takes the program's rate where it has changed, and a restart keeps it."""
    rates(tmp_path, None, 2, 0)
    assert [lr for lr, _ in rates(tmp_path, None, 3, 0, lr=0.01)] == [0.1]
    assert "from_program='optimizer.lr' takes the program's" in capfd.readouterr().err
    assert [lr for lr, _ in rates(tmp_path, None, 4, 0, lr=0.01, from_program="optimizer.lr")] == [0.01]
    assert [lr for lr, _ in rates(tmp_path, None, 5, 0, lr=0.02, from_program=["optimizer.lr"])] == [0.02]
    capfd.readouterr()
    assert [lr for lr, _ in rates(tmp_path, None, 6, 0, lr=0.02, from_program="optimizer.lr")] == [0.02]
    assert "optimizer.lr" not in capfd.readouterr().err


def test_a_rate_that_a_schedule_sets_begins_with_the_program(tmp_path: Path) -> None:
    """A schedule built from the program begins with its rate; the rate alone is refused with that remedy."""
    rates(tmp_path, "cosine", 4, 8)
    whole = rates(tmp_path / "whole", "cosine", 6, 8, lr=0.05)
    with pytest.raises(UsageError, match="use from_program='scheduler'"):
        rates(tmp_path, "cosine", 6, 8, lr=0.05, from_program="optimizer.lr")
    assert rates(tmp_path, "cosine", 6, 8, lr=0.05, from_program="scheduler") == whole[4:]


def test_a_schedule_s_function_is_said_to_have_changed_where_it_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`from_program` blames no function that is the same; another function is told, also without it."""
    rates(tmp_path, "function", 2, 8)
    rates(tmp_path, "function", 3, 8, lr=0.05, from_program="scheduler")
    said = capfd.readouterr().err
    assert "base_lrs[0] was 0.1 and is 0.05 in the program" in said
    assert "new function" not in said and "its function" not in said
    rates(tmp_path, "function", 4, 9, lr=0.05)
    assert "scheduler has a new function" in capfd.readouterr().err
    rates(tmp_path, "function", 5, 9, lr=0.05, from_program="scheduler")
    said = capfd.readouterr().err
    assert "new function" not in said and "its function" not in said
    rates(tmp_path, "function", 6, 8, lr=0.05, from_program="scheduler")
    assert "its function has changed" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["x", "optimizer.nope", "optimizer", "model.weight"])
def test_what_cannot_come_from_the_program_is_refused(tmp_path: Path, name: str) -> None:
    """Names of nothing that a resume could take are refused with those that there are."""
    with pytest.raises(UsageError, match=r"\(scheduler, optimizer\.lr"):
        rates(tmp_path, "cosine", 2, 4, from_program=name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_schedule_that_is_over_already_is_refused(tmp_path: Path) -> None:
    """A horizon before the step where the run is cannot be followed."""
    rates(tmp_path, "one cycle", 6, 6)
    with pytest.raises(UsageError, match="the program's schedule cannot reach step 6 of the run"):
        rates(tmp_path, "one cycle", 8, 3, from_program="scheduler")


@pytest.mark.parametrize("lr", [numpy.float64(0.1), numpy.float32(0.1), numpy.array(0.1), math.inf], ids=repr)
def test_a_rate_that_is_no_plain_number_is_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], lr: Any
) -> None:
    """A rate of numpy's, or one without end, neither fails the saves nor looks changed to a restart."""
    rates(tmp_path, None, 1, 0, lr=lr)
    assert [one for one, _ in rates(tmp_path, None, 2, 0, lr=lr, from_program="optimizer.lr")] == [lr]
    assert "optimizer.lr" not in capfd.readouterr().err
