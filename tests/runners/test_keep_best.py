"""`keep_best` in real runs: the best of the live branch survives what comes after, restarts included."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from kept_job import kept_job, train
from stage import warned

from torchrelay import JobRunner, open_checkpoint
from torchrelay.errors import UsageError

ACC = ("val/acc", "max")
both = pytest.mark.parametrize("asynchronous", [False, True])


def tries(run: Path) -> list[int]:
    return sorted(int(one.name[1:9]) for one in (run / "checkpoints/data").iterdir())


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    """Of equal ones the earlier; zero counts, nan does not; `open_checkpoint` means the same epoch."""
    run, values = tmp_path / "run", [-1.0, 0.0, math.nan, 0.0, -0.5]
    assert train(run, values, keep_best=ACC) == 5
    assert tries(run) == [2, 5]
    assert open_checkpoint(run, epoch="best", best=ACC).epoch == 2


@both
def test_a_restart_keeps_what_was_best_before(tmp_path: Path, asynchronous: bool) -> None:
    """The metrics are in the epochs: a later process, told the same, loses neither of the two best."""
    run = tmp_path / "run"
    first, more = [0.1, 0.9, 0.2, 0.8, 0.3], [0.4, 0.5, 0.85]
    how = dict(keep_best=(*ACC, 2), keep_last=1, keep_every=5, asynchronous=asynchronous)
    assert train(run, first, **how) == 5
    assert tries(run) == [0, 2, 4, 5]
    assert train(run, first + more[:2], **how) == 7
    assert tries(run) == [0, 2, 4, 5, 7]
    assert train(run, first + more, **how) == 8
    assert tries(run) == [0, 2, 5, 8]


def test_after_a_rewind_the_best_of_the_new_branch_counts(tmp_path: Path) -> None:
    """What was abandoned stays until the branch has passed it, and is no rival of what is live."""
    run = tmp_path / "run"
    assert train(run, [0.5, 0.1, 0.9, 0.2], keep_best=ACC, keep_every=2) == 4
    assert tries(run) == [0, 2, 3, 4]
    assert train(run, [0.5, 0.1, 0.3], keep_best=ACC, keep_every=2, resume_from_epoch=2) == 3
    assert tries(run) == [0, 2, 3, 3, 4]
    assert train(run, [0.5, 0.1, 0.3, 0.2, 0.25, 0.0], keep_best=ACC, keep_every=2) == 6
    assert tries(run) == [0, 2, 3, 4, 6]
    assert open_checkpoint(run, epoch="best", best=ACC).epoch == 3


@both
def test_a_metric_that_nobody_logs_deletes_nothing(tmp_path: Path, asynchronous: bool) -> None:
    """Said once, with the metrics that there are: a slip must not cost the epochs that were meant."""
    with warned() as said:
        how = dict(keep_best=("val/ac", "max"), keep_last=1, asynchronous=asynchronous)
        train(tmp_path / "run", [0.1, 0.2, 0.3, 0.4], **how)
    assert tries(tmp_path / "run") == [0, 1, 2, 3, 4]
    (text,) = [one for one in said if "no epoch has a finite value of metric 'val/ac'" in one]
    assert "found: loss, val/acc" in text and "all epochs stay" in text


def test_epochs_before_the_first_evaluation_wait_for_it(tmp_path: Path) -> None:
    """Nobody knows yet which will be the best; afterwards those without a value are not."""
    run = tmp_path / "run"
    with warned():
        train(run, [None, None, None], keep_best=ACC)
        assert tries(run) == [0, 1, 2, 3]
        train(run, [None, None, None, 0.0, None], keep_best=ACC)
    assert tries(run) == [4, 5]


@pytest.mark.parametrize("given", ["val/acc", ("val/acc", "most"), ("val/acc", "max", 0), True])
def test_a_rule_that_means_nothing_is_refused_before_anything_is_made(tmp_path: Path, given: object) -> None:
    """One error with an example; a runner without a directory has nothing to keep."""
    with pytest.raises(UsageError, match=r"invalid keep_best=.*for example"):
        JobRunner(kept_job([0.0]), tmp_path / "run", keep_best=given)
    with pytest.raises(UsageError, match="keep_best needs a run directory"):
        JobRunner(kept_job([0.0]), None, keep_best=ACC)
    assert not (tmp_path / "run").exists()
