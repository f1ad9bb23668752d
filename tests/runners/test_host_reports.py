"""Agreement with one report per host, over a real store with threads as ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import local_store, on_ranks, posted

from torchrelay.errors import DeadlineError, PeerError, StorageError
from torchrelay.jobs.session import decide, together
from torchrelay.runners.distributed.agreement import StorePeers
from torchrelay.runners.distributed.rendezvous import Hosts, StoreClient

UNEVEN = Hosts.of([[0, 1], [2, 4, 5], [3]])
"""Leaders 0, 2 and 3; the ranks of a host are not all next to each other."""
SIZE = 6
MOST = 7
JSON = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.lists(st.integers(0, 2), max_size=2))


@pytest.fixture(scope="module")
def lines() -> Iterator[list[StoreClient]]:
    """A connection per rank, made one by one: torch takes seconds where several are made at once."""
    served = local_store()
    yield [served.clone() for _ in range(MOST)]
    del served  # which has served until now


@pytest.fixture
def peers_of(lines, request):
    """Make the grouped peers of one rank, apart from other tests."""

    def make(rank: int, **options: Any) -> StorePeers:
        return grouped(StorePeers(below(lines[rank], request.node.name), rank, SIZE, **options), UNEVEN)

    return make


def below(line: StoreClient, prefix: str) -> StoreClient:
    """The same connection, seeing only keys below a prefix."""
    return StoreClient(dist.PrefixStore(prefix, line._store), "a local store")


def grouped(peers: StorePeers, hosts: Hosts) -> StorePeers:
    peers.most_posts = 0
    peers.hosts = hosts
    return peers


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Hosts, list[list[Any]]]:
    """Hosts of any sizes, and the values of all ranks in three rounds, often alike."""
    on = draw(st.lists(st.integers(0, 3), min_size=1, max_size=MOST))
    hosts = Hosts.of([rank for rank, at in enumerate(on) if at == host] for host in set(on))
    values = st.lists(JSON, min_size=len(on), max_size=len(on))
    alike = JSON.map(lambda value: [value] * len(on))
    return hosts, draw(st.lists(st.one_of(values, alike), min_size=3, max_size=3))


@settings(max_examples=25, deadline=None)
@given(worlds())
def test_every_rank_gets_what_it_gets_without_reports(lines, world):
    """Whatever the values and however the ranks lie on hosts, all get each rank's value in rank order."""
    hosts, rounds = world
    size = sum(map(len, hosts.members))
    name = f"world-{time.monotonic_ns()}"

    def work(rank: int) -> list[Any]:
        flat = StorePeers(below(lines[rank], f"{name}-flat"), rank, size)
        near = grouped(StorePeers(below(lines[rank], f"{name}-near"), rank, size), hosts)
        both = [peers.exchange("any", said[rank]) for said in rounds for peers in (flat, near)]
        first = near.exchange("first", rounds[0][rank], for_others=lambda _: "told")
        return [*both, first]

    expected = [said for said in rounds for _ in range(2)]
    for rank, got in enumerate(on_ranks(size, work)):
        assert got == [*expected, ["told"] * size if rank else rounds[0]]


def test_leaders_report_and_their_keys_are_deleted(peers_of):
    """The lowest rank of each other host joins its host's posts; old reports go like other old keys."""

    def work(rank: int) -> Any:
        peers = peers_of(rank)
        for number in range(10):
            peers.exchange("numbers", number)
        has = peers._store.has
        return [[has(f"round/{at}/host/{leader}") for leader in range(SIZE)] for at in (1, 9)]

    kept = [False, False, True, True, False, False]
    assert on_ranks(SIZE, work)[0] == [[False] * SIZE, kept]


def test_a_line_apart_has_the_same_hosts(peers_of):
    """Another thread's line meets by the same hosts."""

    def work(rank: int) -> Any:
        line = peers_of(rank).apart()
        line.most_posts = 0
        return line.exchange("line", rank), line._store.has("round/1/host/2")

    assert on_ranks(SIZE, work) == [(list(range(SIZE)), True)] * SIZE


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_failure_on_any_rank_is_raised_on_all(peers_of, failing):
    """Whether the rank leads a host or not: its error is everybody's and names it, the first of several."""

    def work(rank: int) -> None:
        def fail() -> None:
            if rank in (failing, 5):
                raise StorageError(f"disk full on {rank}")

        together(peers_of(rank), "write", fail)

    for error in on_ranks(SIZE, work)[: SIZE - 1]:
        assert isinstance(error, StorageError) and f"disk full on {failing}" in str(error)


def test_rank_0_decides_for_all(peers_of):
    """A decision is taken once and told to all hosts."""
    assert on_ranks(SIZE, lambda rank: decide(peers_of(rank), "x", lambda: rank + 7)) == [7] * SIZE


@pytest.mark.parametrize("apart", range(SIZE))
def test_different_topics_are_told_at_once(peers_of, apart):
    """Whichever rank is at another place: all hear where it is, without waiting for a deadline."""
    began = time.monotonic()
    errors = on_ranks(SIZE, lambda rank: peers_of(rank).exchange("save" if rank == apart else "stop", None))
    assert time.monotonic() - began < 60, "the deadline is ten minutes"
    for error in errors:
        assert isinstance(error, PeerError) and f"rank {apart} at 'save'" in str(error)


@pytest.mark.parametrize("late", range(SIZE))
def test_the_late_rank_is_named_and_not_its_leader(peers_of, late):
    """When a rank does not come, all others name it alone, soon after the deadline."""

    def work(rank: int) -> None:
        peers = peers_of(rank, name_of=lambda at: f"rank-{at}")
        if rank == 0 != late:
            assert posted(peers, set(range(1, SIZE)) - {late})
        if rank != late:
            peers.exchange("save", 1, deadline_secs=0.5)

    began = time.monotonic()
    errors = [error for rank, error in enumerate(on_ranks(SIZE, work)) if rank != late]
    assert time.monotonic() - began < 60
    for error in errors:
        assert isinstance(error, DeadlineError) and "'save'" in str(error)
        assert [rank for rank in range(SIZE) if f"rank-{rank}" in str(error)] == [late]


def test_a_leader_that_dies_before_it_reports_holds_nobody_up(peers_of):
    """What it posted counts as ever: rank 0 reads the posts of its host after the deadline."""

    def work(rank: int) -> Any:
        peers = peers_of(rank)
        if rank == 2:
            peers._round = 1
            entry = {"topic": "save", "value": rank}
            return peers._store.put(peers._key(rank), json.dumps(entry).encode())
        if rank == 0:
            assert posted(peers, range(1, SIZE))
        return peers.exchange("save", rank, deadline_secs=0.5)

    results = on_ranks(SIZE, work)
    assert results == [list(range(SIZE)) if rank != 2 else None for rank in range(SIZE)]


def test_only_the_clock_of_rank_0_says_who_is_late(peers_of):
    """A rank that comes after its leader's deadline and before rank 0's is not late."""

    def work(rank: int) -> Any:
        peers = peers_of(rank)
        if rank == 4:  # it is led by rank 2, which waits longer than its deadline here
            time.sleep(1.0)
        if rank == 0:
            assert posted(peers, range(1, SIZE))
        return peers.exchange("save", rank, deadline_secs=0.5)

    assert on_ranks(SIZE, work) == [list(range(SIZE))] * SIZE


@pytest.mark.parametrize("leaver", range(SIZE))
def test_a_rank_that_left_is_not_waited_for(peers_of, leaver):
    """A leader or another that ended well while others meet is named within seconds."""

    def work(rank: int) -> Any:
        peers = peers_of(rank)
        peers.exchange("all", rank)
        return peers.leave() if rank == leaver else peers.exchange("alone", rank)

    began = time.monotonic()
    others = [one for rank, one in enumerate(on_ranks(SIZE, work)) if rank != leaver]
    assert time.monotonic() - began < 60
    assert all(isinstance(one, PeerError) and f"rank {leaver} exited" in str(one) for one in others)


def test_a_leader_stops_waiting_for_a_known_failure(peers_of):
    """A leader and those that it leads go as soon as the watcher knows of a failed rank."""
    began = time.monotonic()
    errors = on_ranks(
        SIZE, lambda rank: rank == 5 or peers_of(rank, failure=lambda: "rank 5 failed").exchange("x", 1)
    )
    assert time.monotonic() - began < 60, "the deadline is ten minutes"
    assert all(isinstance(one, PeerError) and "rank 5 failed" in str(one) for one in errors[:5])
