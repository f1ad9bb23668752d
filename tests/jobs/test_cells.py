"""Cells of a notebook that are run again: the function that is defined last is the one that runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from torchrelay import Job, JobRunner, Task, max_epochs
from torchrelay.errors import NotAllowedNowError

FIRST = "job = Job('cells')\n@job.epoch\ndef train(ctx): told.append('first')\njob.stop_when(max_epochs(1))"
AGAIN = "@job.epoch\ndef train(ctx): told.append('again')\njob.stop_when(max_epochs(2))"


def cell(text: str, number: int, names: dict[str, Any]) -> None:
    """Run a cell as IPython does, which calls each by a name of its own."""
    exec(compile(text, f"<cell {number}>", "exec"), names)


@pytest.fixture
def names() -> dict[str, Any]:
    return {"__name__": "__main__", "Job": Job, "max_epochs": max_epochs, "told": []}


@pytest.mark.parametrize("ran", [False, True])
def test_a_cell_that_is_run_again_replaces_its_task(
    tmp_path: Path, names: dict[str, Any], caplog: pytest.LogCaptureFixture, ran: bool
) -> None:
    """Before and after a run the new function takes the place of the old one, with one line."""
    cell(FIRST, 1, names)
    if ran:
        assert JobRunner(names["job"], tmp_path / "run").train() == 1
    names["told"].clear()
    with caplog.at_level(logging.WARNING, "torchrelay"):
        cell(AGAIN, 2, names)
    assert [one.getMessage() for one in caplog.records] == [
        "epoch: 'train' is defined again and replaces the earlier one"
    ]
    JobRunner(names["job"], tmp_path / "run").train()
    assert names["told"] == ["again"]


def test_the_very_same_cell_again_runs_its_task_once(tmp_path: Path, names: dict[str, Any]) -> None:
    """To run a cell twice, unchanged, is to have it once."""
    cell(FIRST.partition("\n")[0], 1, names)
    for _ in range(2):
        cell(AGAIN, 2, names)
    JobRunner(names["job"], tmp_path / "run").train()
    assert names["told"] == ["again", "again"], "one for each of two epochs"


def test_functions_of_one_name_in_one_program_all_run(names: dict[str, Any]) -> None:
    """Two definitions in one file, one function twice, and functions made by another one stay apart."""
    twice = "@job.epoch\ndef _(ctx): pass\n@job.epoch\ndef _(ctx): pass\nfor _ in range(2): job.epoch(train)"
    cell(FIRST, 1, names)
    cell(twice, 1, names)
    made = "def make():\n @job.epoch\n def inner(ctx): pass\nmake()\nmake()"
    cell(made, 2, names)
    assert [task.full_name for task in names["job"].epoch_group.tasks()] == [
        "train", "_", "_:1", "train:1", "train:2", "inner", "inner:1",
    ]  # fmt: skip


def test_a_new_name_cannot_join_a_job_that_has_run(tmp_path: Path, names: dict[str, Any]) -> None:
    """What is not defined again is refused as before."""
    cell(FIRST, 1, names)
    JobRunner(names["job"], tmp_path / "run").train()
    with pytest.raises(NotAllowedNowError, match="declare it before the job runs"):
        Task(lambda ctx: None, name="other", group=names["job"].epoch_group)
