"""Which code a rank ends with that cannot ask anybody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrelay.errors import PeerError, TaskFailedError, UsageError
from torchrelay.runners.distributed import world
from torchrelay.runners.distributed.failure import Failure
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
    monkeypatch.setattr(world, "_current", [known])
    error.of_rank = of_rank
    reason = why_of(raised(error, cause))
    assert reason.startswith(begins) and reason.count("PeerError: gone") == named
