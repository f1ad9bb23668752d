"""Other threads agree over lines of their own, whatever the main threads talk about meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from ranks import local_store, on_ranks

from torchrelay.jobs.session import Solo
from torchrelay.runners.distributed.agreement import StorePeers

SIZE = 3
ROUNDS = 20


def test_lines_do_not_hear_each_other() -> None:
    """Rounds of two lines and of the peers themselves run at once, each with its own topics and values."""
    store = local_store()

    def work(rank: int) -> list[Any]:
        peers = StorePeers(store.clone("peers"), rank, SIZE)
        lines = [peers, peers.apart(), peers.apart()]
        heard: list[list[Any]] = [[] for _ in lines]

        def talk(number: int) -> None:
            for turn in range(ROUNDS):
                heard[number] += lines[number].exchange(f"line {number}", [number, turn, rank])

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(lines))]
        for thread in threads if rank % 2 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(90)
        return heard

    expected = [
        [[number, turn, rank] for turn in range(ROUNDS) for rank in range(SIZE)] for number in range(3)
    ]
    assert on_ranks(SIZE, work) == [expected] * SIZE


def test_alone_there_is_nobody_to_be_apart_from() -> None:
    """A single process is its own line."""
    assert Solo().apart().exchange("any", 1) == [1]
