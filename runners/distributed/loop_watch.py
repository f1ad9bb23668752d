"""Finds ranks that will not come to a loop of `ctx.steps` in which others wait for them, or are stuck.

The thread that trains looks while it waits for an agreement of the loop, and raises. The watcher's looks when
the loop is still for seconds (in a collective of the program, say), and reports, which ends all processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torchrelay.errors import DeadlineError, PeerError, UsageError
from torchrelay.runners.distributed.store import POLL_SECS, StoreClient
from torchrelay.runners.loops import Loops, Note, contradiction
from torchrelay.runners.phase import phase

STILL_SECS = 3.0
"""How long a rank begins no step of its loop before its watcher compares: the loop itself finds it first."""
_LEFT, _WAITS = "left", "waits"
_ASKED = 16


class LoopWatch:
    """What one rank knows of the others' loops. Newer notes replace older ones, whoever's: all write again.

    `failure()` is what the watcher knows of a failed rank, `ask(ranks)` what ranks say that they are doing.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        size: int,
        loops: Loops,
        failure: Callable[[], str | None],
        ask: Callable[[Sequence[int]], dict[int, str]],
    ) -> None:
        self._rank, self._size, self._loops = rank, size, loops
        self._failure, self._ask = failure, ask
        self._store, self._watching = store.clone("loops"), store.clone("loops")
        loops.show = lambda: self._put(_LEFT)

    def show_waiting(self) -> None:
        """Let others see the loops of this rank, which waits for them. For the thread that trains."""
        self._put(_WAITS)

    def astray(self) -> str | None:
        """What keeps this rank in its loop for good, whatever call it is in; for the watcher's thread."""
        if not self._loops.still_for(STILL_SECS):
            return None
        return self._contradiction(self._watching)

    def wait(self, work: Any) -> None:
        """Wait for an agreement of a loop; for the thread that trains.

        Raises UsageError naming a rank that does not come because it has left the loop, or makes another,
        PeerError where a rank has failed, DeadlineError saying where all are when the group's time is over.
        """
        poll = timedelta(seconds=POLL_SECS)
        while True:
            try:
                work.wait(poll)
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._late(error) from error
            with phase.during("waiting for the others in ctx.steps"):
                if (found := self._contradiction(self._store)) is not None:
                    raise UsageError(found)
                self._check_failed()
                self.show_waiting()  # after it looked: its note replaces that of another
                if (failure := self._failure()) is not None:
                    raise PeerError(failure)

    def _late(self, error: RuntimeError) -> Exception:
        """What the end of an agreement without an answer is: its time is over, or a connection broke."""
        if "timed out" not in str(error).lower():
            return error
        others = [rank for rank in range(self._size) if rank != self._rank][:_ASKED]
        doing = self._ask(others)
        mute = "does not say where it is"
        where = "; ".join(f"rank {one} {'is in ' + doing[one] if one in doing else mute}" for one in others)
        return DeadlineError(
            f"waited for the others in ctx.steps for as long as a collective may take: {where}"
        )

    def _contradiction(self, store: StoreClient) -> str | None:
        own = self._loops.note()
        for rank, note in self._notes(store):
            if not note["failed"] and (found := contradiction(self._rank, own, rank, note)) is not None:
                return found
        return None

    def _check_failed(self) -> None:
        """Leave the loop when another rank has failed, to hear of it where all meet."""
        for rank, note in self._notes(self._store):
            if note["failed"] and note["run"] == self._loops.note()["run"]:
                error = PeerError(f"rank {rank} failed while this one was in a loop of ctx.steps")
                error.consequence = True
                raise error

    def _notes(self, store: StoreClient) -> list[tuple[int, Note]]:
        with suppress(PeerError):  # the watcher looks after the store
            found = [store.get([key])[0] for key in (_LEFT, _WAITS) if store.has(key)]
            return [(rank, note) for rank, note in map(json.loads, found) if rank != self._rank]
        return []

    def _put(self, key: str) -> None:
        with suppress(PeerError):
            self._store.put(key, json.dumps([self._rank, self._loops.note()]).encode())
