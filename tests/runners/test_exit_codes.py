"""Which code a rank ends with that cannot ask anybody."""

from __future__ import annotations

import pytest

from torchrelay.errors import PeerError, TaskFailedError, UsageError
from torchrelay.runners.distributed.world import code_of, is_consequence


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
