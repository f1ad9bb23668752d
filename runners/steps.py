"""`ctx.steps(loader)`: an epoch's steps, begun and ended together by all processes.

Who knows what before a step begins:

- limits on steps are the same everywhere and need no words;
- how long a loader is, is the same everywhere for an EpochLoader (its steps are exactly equal); of any
  other loader each process looks one batch ahead and tells the others whether it has one;
- stop requests and time limits are known to one process first and are told. A preemption ends the tasks
  at the step, by Interrupted; anything else ends the loop, and the epoch as a short one.
- so is that somebody wants a save: then all make it at one step, and go on.

What is told travels as one maximum over all processes, posted before a step and awaited after it, so
that it overlaps with the step's own work: a stop that was asked for during one step ends the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torchrelay.runners.ending.cursor import Cursor, Loop
from torchrelay.runners.ending.interruption import Interrupted
from torchrelay.runners.ending.requests import NOT_ASKED, PREEMPT
from torchrelay.runners.run_state import RunState
from torchrelay.runners.siblings import Siblings

logger = logging.getLogger("torchrelay")
_END = object()


class FlagsHandle(Protocol):
    """An agreement on its way."""

    def wait(self) -> tuple[int, ...]:
        """Block until all processes have posted; the maximum of every flag."""


class Agreeing(Protocol):
    """What a session offers for agreements inside an epoch."""

    def agree_flags(self, flags: tuple[int, ...]) -> FlagsHandle:
        """Post this process' flags and return at once. All processes post in the same order."""


@dataclass(frozen=True)
class Steps:
    """One loop over the batches of a loader, on one node.

    `counted` loops count steps, obey limits and stop requests; others run through, unless all are to leave at
    once (`polled` is False in threads of tasks, which end with their siblings). `agreeing` is None
    where no other process takes part: one process, or a task in a thread of its own. `cursor` follows the
    node through the tasks of an epoch. The loop ends by CancelledError when one of the `siblings` failed,
    and by Interrupted where all leave.
    """

    state: RunState
    node: str
    loader: Iterable[Any]
    counted: bool
    agreeing: Agreeing | None
    siblings: Siblings
    polled: bool = True
    cursor: Cursor | None = None

    def __iter__(self) -> Iterator[Any]:
        """Batches until all processes end."""
        if self.cursor is not None and self.cursor.comes_back(counted=self.counted) and self.state.put_back:
            self.state.put_back(self.node, self.agreeing)
        loop = self.cursor.enter(self.loader, counted=self.counted) if self.cursor is not None else None
        if self.counted and self.state.must_end(self.node):
            return
        source = self.loader if loop is None else loop.source
        if self.counted:
            self._tell_length(loop)
        if self.agreeing is None:
            yield from self._alone(source, loop)
        elif is_even(self.loader):
            yield from self._even(source, loop, self.agreeing)
        else:
            yield from self._uneven(source, loop, self.agreeing)

    def _tell_length(self, loop: Loop | None) -> None:
        """Say how many steps this loop has left, where its loader knows; people watch that."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except Exception:  # a loader of others may raise anything, or have no length
            return
        self.state.expect_steps(self.node, max(length - (loop.taken if loop is not None else 0), 0))

    def _alone(self, source: Iterable[Any], loop: Loop | None) -> Iterator[Any]:
        for batch in source:
            yield self._begin(batch, loop)
            if self._ended(self._urgency() if self.polled else NOT_ASKED, loop):
                return
            self._save_if(self._save_wanted(), loop)

    def _even(self, source: Iterable[Any], loop: Loop | None, agreeing: Agreeing) -> Iterator[Any]:
        """As many batches everywhere: only stop requests are told, every `agree_every` steps."""
        everywhere = self.cursor is not None and self.cursor.everywhere and self.state.requests is not None
        polled = self.counted or (self.polled and everywhere)
        for index, batch in enumerate(source):
            asking = polled and index % self.state.agree_every == 0
            handle = agreeing.agree_flags((self._urgency(), self._save_wanted())) if asking else None
            yield self._begin(batch, loop)
            urgency, save = handle.wait() if handle else (NOT_ASKED, 0)
            if self._ended(urgency, loop):
                return
            self._save_if(save, loop)

    def _uneven(self, source: Iterable[Any], loop: Loop | None, agreeing: Agreeing) -> Iterator[Any]:
        """Each process looks one batch ahead; the first that runs dry ends the loop for all."""
        batches = iter(source)
        ahead = next(batches, _END)
        handle = agreeing.agree_flags((int(ahead is _END), NOT_ASKED, 0))
        while True:
            exhausted, urgency, save = handle.wait()
            if exhausted:
                self._tell_surplus(dropped=ahead is not _END)
                return
            if self._ended(urgency):
                return
            self._save_if(save)
            batch, ahead = ahead, next(batches, _END)
            handle = agreeing.agree_flags((int(ahead is _END), self._urgency(), self._save_wanted()))
            yield self._begin(batch, loop)

    def _urgency(self) -> int:
        """What this process brings to an agreement; an evaluation knows no urgency but to leave."""
        if self.counted:
            return self.state.urgency()
        requests = self.state.requests
        if requests is None or not self.polled:
            return NOT_ASKED
        patient = self.cursor is not None and self.cursor.costs_the_epoch
        return PREEMPT if requests.level(patient=patient) == PREEMPT else NOT_ASKED

    def _save_wanted(self) -> int:
        """Whether this process asks for a save in this loop, which all nodes must be in."""
        alone = self.agreeing is None and self.polled
        everywhere = self.cursor is not None and self.cursor.everywhere
        return int(self.counted and (alone or everywhere) and self.state.save_wanted())

    def _save_if(self, wanted: int, loop: Loop | None = None) -> None:
        """Save here where a process wants it; behind the last batch the end of the epoch does."""
        if wanted and self.state.save_now is not None and not (loop is not None and loop.exhausted):
            self.state.save_now()

    def _begin(self, batch: Any, loop: Loop | None) -> Any:
        self.siblings.check()
        self.state.check()
        if loop is not None:
            loop.taken += 1
        if self.counted:
            self.state.count_step(self.node)
        return batch

    def _ended(self, urgency: int, loop: Loop | None = None) -> bool:
        """Whether this loop ends before its loader does. Raises Interrupted where all leave.

        Not after the last batch: what stands behind the loop may need what the loop has left in variables.
        """
        if urgency == PREEMPT:
            if loop is not None and loop.exhausted:
                return False
            raise Interrupted
        if not self.counted:
            return False
        if urgency != NOT_ASKED:
            self.state.end_epoch_at(self.node, urgency)
        return self.state.must_end(self.node)

    def _tell_surplus(self, *, dropped: bool) -> None:
        if dropped and self.state.first_time(f"surplus of {self.node}"):
            logger.warning(
                "%s: other processes ran out of batches first; the surplus here is dropped in every epoch. "
                "EpochLoader gives all processes equally many steps and drops nothing.",
                self.node,
            )


def is_even(loader: Any) -> bool:
    """Whether a loader promises the same number of steps in every process."""
    from torchrelay.jobs.epoch_loader import EpochLoader

    return isinstance(loader, EpochLoader)
