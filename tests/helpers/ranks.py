"""Ranks as threads over a real TCPStore of this process, for quick tests of agreement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from torchrelay.runners.distributed.agreement import StorePeers
from torchrelay.runners.distributed.rendezvous import StoreClient


def local_store() -> StoreClient:
    """Serve a store on a free port of this machine."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return StoreClient(store, f"127.0.0.1:{store.port}")


def on_ranks(size: int, work: Callable[[int], Any], timeout_secs: float = 100) -> list[Any]:
    """Run `work(rank)` in a thread per rank; return its results, or what it raised, in rank order."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_secs)
        assert not thread.is_alive(), "a rank hangs"
    return results


def posted(peers: StorePeers, ranks: Iterable[int]) -> bool:
    """Wait until these ranks have posted their first value: then they are not late, however busy we are."""
    keys = [f"round/1/{rank}" for rank in ranks]
    return any(peers._store.wait(keys) for _ in range(60))  # a second at most each
