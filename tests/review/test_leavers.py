"""Nobody waits for a rank that has left."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ranks import local_store, on_ranks

from torchrelay.errors import PeerError
from torchrelay.runners.distributed.agreement import StorePeers


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_left_is_not_waited_for(leaver: int) -> None:
    """A rank that ended well while others meet is named within seconds, not after the deadline."""
    store = local_store()

    def work(rank: int) -> Any:
        peers = StorePeers(store.clone("peers"), rank, 3)
        peers.exchange("together", rank)
        if rank == leaver:
            return peers.leave()
        return peers.exchange("alone", rank)

    began = time.monotonic()
    results = on_ranks(3, work)
    assert time.monotonic() - began < 60
    others = [one for rank, one in enumerate(results) if rank != leaver]
    assert all(isinstance(one, PeerError) and f"rank {leaver} exited without" in str(one) for one in others)


def test_a_rank_that_leaves_after_the_last_round_disturbs_nobody() -> None:
    """Ranks that read the last answer late get it, although those before them have left."""
    store = local_store()

    def work(rank: int) -> Any:
        peers = StorePeers(store.clone("peers"), rank, 3)
        rounds = [peers.exchange("round", [rank, number]) for number in range(20)]
        peers.leave()
        return rounds

    assert on_ranks(3, work) == [[[[r, n] for r in range(3)] for n in range(20)]] * 3
