"""Which code a rank ends with that cannot ask anybody."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.errors import PeerError, TaskFailedError, UsageError
from torchrelay.runners.distributed import launcher
from torchrelay.runners.distributed.launcher import Failure
from torchrelay.runners.distributed.world import code_of, is_consequence, why_of


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as found:
        return found


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (TaskFailedError("step"), RuntimeError("[gloo] Connection closed by peer [10.0.0.2]"), 6),
        (TaskFailedError("step"), ValueError("bad sample"), 1),
        (RuntimeError("Timed out waiting 1000ms for recv"), None, 6),
        (ValueError("mine"), None, 1),
        (UsageError("option"), RuntimeError("Connection reset by peer"), 2),
        (PeerError("late"), None, 6),
    ],
)
def test_a_broken_connection_is_a_lost_peer_whatever_it_was_raised_as(error, cause, code):
    """A failed task is 1, unless the connection to another process broke under it; other codes stay."""
    assert code_of(raised(error, cause)) == code


def test_the_failure_that_another_rank_told_keeps_its_code():
    """A task that failed elsewhere is a failed task everywhere, and only a consequence here."""
    error = TaskFailedError("step 'train' failed on trainer_1: RuntimeError: Connection closed by peer")
    error.of_rank = 1
    assert code_of(error) == 1 and is_consequence(error)


@pytest.mark.parametrize(
    ("error", "cause", "of_rank", "begins", "named"),
    [
        (
            TaskFailedError("step"),
            RuntimeError("Connection reset by peer"),
            None,
            "rank 1 on gpu07 failed",
            1,
        ),
        (
            PeerError("late: rank 1 on gpu07 failed in the job: PeerError: gone"),
            None,
            None,
            "PeerError: l",
            1,
        ),
        (TaskFailedError("step"), ValueError("bad sample"), None, "TaskFailedError: step", 0),
        (TaskFailedError("rank 1: step"), None, 1, "TaskFailedError: rank 1", 0),
    ],
)
def test_a_run_keeps_what_broke_it_not_what_that_broke(monkeypatch, error, cause, of_rank, begins, named):
    """What is noted of a connection that broke is the end of the rank behind it, once."""
    first = Failure(1, "gpu07", "the job", "PeerError: gone", 6)
    known = SimpleNamespace(env=SimpleNamespace(rank=0), watcher=SimpleNamespace(failure=first))
    monkeypatch.setattr(launcher, "worlds", [known])
    error.of_rank = of_rank
    reason = why_of(raised(error, cause))
    assert reason.startswith(begins) and reason.count("PeerError: gone") == named


class BadSample(ValueError):
    """Made of more than a text, with an attribute of its own."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path = path


@pytest.mark.parametrize(
    "cause", [ValueError("v"), BadSample("f", 3), KeyError("k"), FileNotFoundError(2, "none", "f"),
              UnicodeDecodeError("utf8", b"x", 0, 1, "r"), torch.OutOfMemoryError("gpu")],
)  # fmt: skip
def test_the_exception_of_a_task_is_caught_by_its_class(cause: Exception) -> None:
    """`except ValueError` around `train()` catches a task's ValueError, as the TaskFailedError that it is."""
    job = Job("fails", blobs={"w": torch.zeros(2)})

    @job.epoch
    def train(ctx: object) -> None:
        raise cause

    job.stop_when(max_epochs(1))
    with pytest.raises(type(cause)) as caught:
        JobRunner(job).train()
    error = caught.value
    assert isinstance(error, TaskFailedError) and error.exit_code == 1 and error.__cause__ is cause
    assert str(error).startswith("step 'train' of task 'train' failed on trainer_0") and error.details
    assert getattr(error, "path", "f") == "f"
    assert str(copy.copy(error)) == str(error), "sweeps send it between processes"


@pytest.mark.parametrize("cause", [StopIteration(), StopAsyncIteration()])
def test_the_end_of_an_iteration_stays_behind_the_failure(cause: Exception) -> None:
    """A StopIteration that leaves `train()` would mean something else to generators that call it."""
    error = raised(TaskFailedError("step"), cause)
    assert isinstance(error, TaskFailedError) and error.also_of_its_cause() is error
