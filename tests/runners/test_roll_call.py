"""The handshake by which the processes of one attempt find each other."""

from __future__ import annotations

import threading
import time

import pytest
from ranks import local_store, on_ranks

from torchrelay.errors import DeadlineError
from torchrelay.runners.distributed.rendezvous import agree_on_nonce


@pytest.fixture(scope="module")
def served():
    return local_store()


def _attempt(served, name, size, ranks=None, delays=None, secs=60.0):
    # One by one: torch takes seconds where several are made at once.
    stores = [served.clone(name) for _ in range(size)]

    def work(rank):
        if ranks is not None and rank not in ranks:
            return None
        time.sleep((delays or {}).get(rank, 0))
        return agree_on_nonce(stores[rank], rank, size, timeout_secs=secs)

    return on_ranks(size, work)


@pytest.mark.parametrize("late", [0, 1])
def test_each_attempt_has_a_nonce_of_its_own(served, late):
    """In the same store under the same keys, later attempts never take up an earlier one's roll."""
    seen = []
    for _ in range(4):
        nonces = _attempt(served, f"attempts{late}", 3, delays={late: 0.2})
        assert len(set(nonces)) == 1
        seen.append(nonces[0])
    assert len(set(seen)) == 4


def test_world_size_may_change_between_attempts(served):
    """Keys of a larger or smaller attempt before do not disturb."""
    for size in (4, 2, 3):
        assert len(set(_attempt(served, "sizes", size))) == 1


def test_tokens_of_a_dead_attempt_are_not_answered_for(served):
    """With only old tokens in place of a rank, rank 0 goes on waiting and then names it."""
    _attempt(served, "dead", 3)
    results = _attempt(served, "dead", 3, ranks={0, 1}, secs=5)
    assert isinstance(results[0], DeadlineError) and "missing: rank 2" in str(results[0])
    assert isinstance(results[1], DeadlineError)


def test_a_rank_that_never_started_is_named(served):
    """Rank 0 says which ranks did not start."""
    results = _attempt(served, "never", 3, ranks={0}, secs=1)
    assert "missing: ranks 1, 2" in str(results[0])


def test_an_old_token_that_overwrites_the_new_one_is_survived(served):
    """A dying process of an earlier attempt that posts late does not hold the new one up for ever."""
    client = served.clone("late")
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.01):
            client.put("hello/1", b"old")

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    threading.Timer(1.0, stop.set).start()
    assert len(set(_attempt(served, "late", 2))) == 1
    thread.join(60)
