"""Starts that get no further end with 93, whoever starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrelay import Context, Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import NoProgressError, TaskFailedError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.training.plan import parse_options


def start(run: Path, fails_in: int, error: type[BaseException] = OSError, **options) -> list[int]:
    """Two epochs, of which one fails; returns which epochs began, and the attempt as the job sees it."""
    seen: list[int] = []
    job = Job("attempts", blobs={"total": torch.zeros(1)})

    @job.epoch
    def learn(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if ctx.epoch == fails_in:
            raise error("no")

    job.stop_when(max_epochs(2))
    train = {name: options.pop(name) for name in ("resume_from_epoch", "again") if name in options}
    JobRunner(job, run, **options).train(LocalSession(), **train)
    return seen


def test_three_starts_at_one_place_are_all(tmp_path):
    """The next one runs nothing and says how to go on; with a larger limit it does go on."""
    for _ in range(1 + 3):  # the first one gets to epoch 1
        with pytest.raises(TaskFailedError):
            start(tmp_path, fails_in=2)
    for _ in range(2):
        with pytest.raises(
            NoProgressError, match=r"3 launches in a row started at epoch 1.*--max-attempts 6"
        ) as told:
            start(tmp_path, fails_in=0)
        assert told.value.exit_code == 93
    status = RunDirectory(tmp_path).status()
    assert status["state"] == "FAILED" and status["exit_code"] == 93
    assert start(tmp_path, fails_in=0, max_attempts=4) == [6]


def test_a_start_that_got_further_begins_the_count_anew(tmp_path):
    """Two failures at the beginning and two after the first epoch are no reason to give up."""
    for fails_in in (1, 1, 2, 2, 2):
        with pytest.raises(TaskFailedError):
            start(tmp_path, fails_in=fails_in)
    with pytest.raises(NoProgressError):
        start(tmp_path, fails_in=2, max_attempts=2)
    assert start(tmp_path, fails_in=0, max_attempts=0) == [6]


def test_what_a_person_ends_or_mends_does_not_count(tmp_path):
    """Ctrl-C and mistakes in usage are no attempts; an explicit epoch, asked for again, is its own start."""
    for error in (KeyboardInterrupt, UsageError, KeyboardInterrupt, UsageError):
        with pytest.raises(error):
            start(tmp_path, fails_in=2, error=error)
    for _ in range(4):
        with pytest.raises(TaskFailedError):
            start(tmp_path, fails_in=2, resume_from_epoch=1, again=True)
    assert start(tmp_path, fails_in=0)


def test_the_option_says_so_too(tmp_path):
    """`--max-attempts` is a whole number; 0 is no limit."""
    assert parse_options(["--max-attempts", "0"]).max_attempts == 0
    for bad in ("-1", "many"):
        with pytest.raises(UsageError):
            parse_options(["--max-attempts", bad])
    with pytest.raises(UsageError, match="invalid max_attempts=-1"):
        start(tmp_path, fails_in=0, max_attempts=-1)
