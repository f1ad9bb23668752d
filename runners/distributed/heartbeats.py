"""Heartbeats per host: any rank of a host keeps it alive, two hosts' lowest ranks follow all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchrelay.runners.distributed.processes import ProcessId, by_group
from torchrelay.runners.distributed.store import StoreClient

_FOLLOWING_HOSTS = 2  # the second notices when the first is lost


class Heartbeats:
    """The heartbeats of the hosts, bumped and followed by one rank.

    Ranks that cannot see each other's end by the kernel must hear of each other; within a host
    the kernel tells. A process that holds Python's lock for long is carried by its neighbours.
    """

    def __init__(
        self, store: StoreClient, rank: int, processes: Sequence[ProcessId], silence_secs: float
    ) -> None:
        self.store = store
        self._silence_secs = silence_secs
        self._groups = list(by_group(processes).values())
        self._own = next(index for index, ranks in enumerate(self._groups) if rank in ranks)
        self._follows = any(ranks[0] == rank for ranks in self._groups[:_FOLLOWING_HOSTS])
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = time.monotonic()

    def bump_and_follow(self) -> list[int]:
        """Bump the own host; return the ranks of a host that was silent for too long, if any."""
        self.store.add(_beat(self._own), 1)
        now, before = time.monotonic(), self._looked
        self._looked = now
        if not self._follows or len(self._groups) == 1:
            return []
        self._note(now, paused_secs=max(0.0, now - before - self._silence_secs / 2))
        return self._silent(now)

    def _note(self, now: float, paused_secs: float) -> None:
        """Note which counters moved; a pause of this process is no silence of the others."""
        others = [index for index in range(len(self._groups)) if index != self._own]
        for index in others:
            count = self.store.add(_beat(index), 0)
            known, since = self._seen.get(index, (-1, now))
            self._seen[index] = (count, now if count != known else since + paused_secs)

    def _silent(self, now: float) -> list[int]:
        for index, (_, since) in self._seen.items():
            if now - since >= self._silence_secs:
                return self._groups[index]
        return []


def _beat(index: int) -> str:
    return f"beat/{index}"
