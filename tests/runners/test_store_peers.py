"""Agreement over a real store, with threads as ranks."""

from __future__ import annotations

import threading
import time

import pytest
from ranks import local_store, on_ranks, posted

from torchrelay.errors import DeadlineError, PeerError, StorageError, TaskFailedError
from torchrelay.jobs.session import decide, together
from torchrelay.runners.distributed.agreement import StorePeers
from torchrelay.runners.distributed.rendezvous import POLL_SECS


@pytest.fixture(scope="module")
def served():
    return local_store()


@pytest.fixture
def peers_of(served, request):
    """Make the peers of one rank, each with its own connection, apart from other tests."""

    def make(rank, size, **options):
        return StorePeers(served.clone(request.node.name), rank, size, **options)

    return make


def test_values_come_in_rank_order_over_many_rounds(peers_of):
    """Every rank gets every value in rank order, round after round, and old keys are deleted."""

    def work(rank):
        peers = peers_of(rank, 3)
        rounds = [peers.exchange("numbers", [rank, n]) for n in range(50)]
        return rounds, peers._store.has("round/1/0"), peers._store.has("round/40/all")

    expected = [[[rank, n] for rank in range(3)] for n in range(50)]
    assert on_ranks(3, work) == [(expected, False, False)] * 3


def test_ranks_that_wait_for_seconds_print_nothing(peers_of, capfd):
    """Others that wait three seconds for a rank at work make no line of torch appear, nor keep a thread."""
    before = threading.active_count()

    def work(rank):
        peers = peers_of(rank, 2)
        if rank == 0:
            time.sleep(3 * POLL_SECS)
        return peers.exchange("validated", rank)

    assert on_ranks(2, work) == [[0, 1]] * 2
    assert "".join(capfd.readouterr()) == ""
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


def test_long_values_travel_in_parts(peers_of):
    """Values above what the store takes at once arrive whole, and are deleted with all their parts."""
    long = "ä" * (6 << 20)

    def work(rank):
        peers = peers_of(rank, 2)
        whole = peers.exchange("long", long if rank else None) == [None, long]
        begun = peers._store.has("round/1/1#1", "round/1/all#1")
        for _ in range(4):
            peers.exchange("short", None)
        kept = [peers._store.has(f"round/1/{key}") for key in ("1", "1#0", "1#1", "all", "all#0", "all#1")]
        peers.exchange("the end", None)
        return whole, begun, any(kept)

    assert on_ranks(2, work) == [(True, True, False)] * 2


def test_a_failure_on_one_rank_is_raised_on_all(peers_of):
    """The rank that failed raises its own error, the others the same class naming the rank."""

    def work(rank):
        def fail():
            if rank == 1:
                raise StorageError("disk full")

        together(peers_of(rank, 3), "write", fail)

    errors = on_ranks(3, work)
    assert [type(error) for error in errors] == [StorageError] * 3
    assert str(errors[1]) == "disk full"
    assert "rank 1" in str(errors[0]) and "disk full" in str(errors[2])


def test_rank_0_decides_for_all(peers_of):
    """A decision is taken once and told to all."""
    assert (
        on_ranks(3, lambda rank: decide(peers_of(rank, 3), "choose", lambda: {"epoch": 7}))
        == [{"epoch": 7}] * 3
    )


def test_different_topics_are_told_at_once(peers_of):
    """Ranks at different places all hear which ranks are where, without waiting for a deadline."""
    began = time.monotonic()
    errors = on_ranks(3, lambda rank: peers_of(rank, 3).exchange("save" if rank == 2 else "stop", None))
    assert time.monotonic() - began < 60, "the deadline is ten minutes"
    for error in errors:
        assert isinstance(error, PeerError)
        assert "ranks 0, 1 at 'stop'" in str(error) and "rank 2 at 'save'" in str(error)


def test_different_topics_tell_the_failure_behind_them(peers_of):
    """A rank that failed while the others went on is named with its error."""

    def work(rank):
        def fail():
            raise TaskFailedError("no such sample")

        peers = peers_of(rank, 2)
        return together(peers, "end of 'epoch'", fail) if rank else peers.exchange("reduce", None)

    errors = on_ranks(2, work)
    assert isinstance(errors[1], TaskFailedError)
    assert "rank 1 failed with TaskFailedError: no such sample" in str(errors[0])


@pytest.mark.parametrize("late", [0, 2])
def test_late_ranks_are_named(peers_of, late):
    """When a rank does not come, all others name it and the topic after the deadline."""
    ready = threading.Barrier(2)  # who is slow to begin must not be late, too

    def work(rank):
        peers = peers_of(rank, 3, name_of=lambda r: f"rank {r} on host{r}")
        if rank != late:
            ready.wait(60)
        if rank == 0 != late:
            assert posted(peers, {1, 2} - {late})
        if rank != late:
            peers.exchange("save", 1, deadline_secs=0.5)

    errors = [error for rank, error in enumerate(on_ranks(3, work)) if rank != late]
    for error in errors:
        assert isinstance(error, DeadlineError)
        assert f"rank {late} on host{late}" in str(error) and "'save'" in str(error)
        assert not any(f"host{rank}" in str(error) for rank in range(3) if rank != late)


def test_a_known_failure_ends_the_wait(peers_of):
    """Nobody waits for a rank that the watcher knows has failed."""
    began = time.monotonic()
    errors = on_ranks(
        2,
        lambda rank: (
            peers_of(rank, 2, failure=lambda: "rank 1 on gpu7 failed").exchange("x", 1) if rank == 0 else None
        ),
    )
    assert time.monotonic() - began < 60, "the deadline is ten minutes"
    assert isinstance(errors[0], PeerError) and "rank 1 on gpu7 failed" in str(errors[0])


def test_a_lost_store_is_an_error_at_once():
    """When the store's server is gone, a wait ends with exit code 6."""
    served = local_store()
    peers = StorePeers(served.clone(), 0, 2)
    del served
    with pytest.raises(PeerError, match="does not answer") as caught:
        peers.exchange("x", 1)
    assert caught.value.exit_code == 6


def test_what_only_rank_0_needs_does_not_travel_to_the_others(peers_of):
    """Rank 0 gets the values, the others what is told of them; a failure of any rank is everybody's still."""

    def work(rank):
        peers = peers_of(rank, 3)
        values = together(peers, "report", lambda: {"bytes": rank}, for_first=True)
        answer = peers._store.get(["round/1/all"])[0]

        def fail():
            if rank == 2:
                raise StorageError("disk full")
            return "long" * 1000

        try:
            together(peers, "write", fail, for_first=True)
        except StorageError as error:
            return values, b"bytes" in answer, "disk full" in str(error)

    others = ([None] * 3, False, True)
    assert on_ranks(3, work) == [([{"bytes": 0}, {"bytes": 1}, {"bytes": 2}], False, True), others, others]


def test_what_is_done_meanwhile_begins_when_the_value_is_there(peers_of):
    """Rank 0 waits in it for what rank 1 makes of its value; where its own work failed it is not called."""
    heard, called = threading.Event(), []

    def fail():
        raise StorageError("disk full")

    def work(rank):
        peers = peers_of(rank, 2)
        if rank == 1:
            while not peers._store.has("round/1/0"):  # only what is posted ends this
                time.sleep(0.01)
            heard.set()
        meanwhile = (lambda: called.append(heard.wait(20))) if rank == 0 else None
        values = together(peers, "went well", lambda: rank, meanwhile=meanwhile)
        with pytest.raises(StorageError, match="disk full"):
            together(peers, "did not", fail if rank == 0 else lambda: rank, meanwhile=meanwhile)
        return values

    assert (on_ranks(2, work), called) == ([[0, 1]] * 2, [True])


def test_what_all_say_alike_is_told_once(peers_of):
    """The answer to equal posts does not grow with the ranks, and everybody still gets a value per rank."""

    def work(rank):
        peers = peers_of(rank, 5)
        values = peers.exchange("plan", "x" * 1000)
        return values == ["x" * 1000] * 5, len(peers._store.get(["round/1/all"])[0]) < 1100

    assert on_ranks(5, work) == [(True, True)] * 5
