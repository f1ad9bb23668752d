"""Loops over `ctx.steps(loader)` that all processes begin and end together, and threads of one node.

All processes exchange one maximum, posted before a step and awaited after it, so that it overlaps with the
step: a stop requested during one step ends the next one.

- Step limits, and the length of an EpochLoader, are the same everywhere. Of other loaders each process
  prefetches one batch and reports if it has one.
- A preemption ends the tasks at the step by Interrupted; other stops end the loop, and with it the epoch.
- In a task of some ranks only these agree about the end of their batches; requests wait for a loop of all.
- Requests wait for the end of an accumulation window unless the time is too short.
- A rank that leaves alone by `break`, or runs a loop that others do not, is found by comparison (`loops`).
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from typing import Any, Protocol

from torchrelay.errors import RelayError, TaskFailedError, UsageError
from torchrelay.jobs.blobs import Step, step_name
from torchrelay.jobs.task import Task
from torchrelay.records import dataclass
from torchrelay.runners.distributed.loops import ALL, REMEDY, LoopRecord, Loops
from torchrelay.runners.session.mid_epoch import Cursor, Loop, is_epoch_loader
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import NOT_ASKED, PREEMPT, Interrupted

logger = logging.getLogger("torchrelay")
_PATIENCE_SECS = 30.0


class CancelledError(BaseException):
    """Ends a step whose sibling failed; passes `except Exception` and never leaves a run."""


class Siblings:
    """Threads of one node's run and their first failure; they also end if a sibling `above` fails."""

    def __init__(self, above: Siblings | None = None) -> None:
        self._above = above
        self.error: BaseException | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def cancelled(self) -> bool:
        """True if a sibling failed, so that all should end soon."""
        return self._failed.is_set() or (self._above is not None and self._above.cancelled)

    def check(self) -> None:
        """Raise CancelledError if a sibling failed."""
        if self.cancelled:
            raise CancelledError

    def fail(self, error: BaseException) -> None:
        """Record a failure; only the first counts, and CancelledError does not."""
        with self._lock:
            if self.error is None and not isinstance(error, CancelledError):
                self.error = error
        self._failed.set()

    def guarded(self, work: Callable[[], object]) -> None:
        """Run `work`; a failure is recorded instead of raised."""
        try:
            work()
        except BaseException as error:
            self.fail(error)

    def start(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """Run `work` in a new thread."""
        thread = threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        """Wait for all threads; after a failure, log which threads are still running."""
        for thread in self._threads:
            thread.join(_PATIENCE_SECS)
            while thread.is_alive():
                if self.cancelled:
                    logger.warning(
                        "waiting for %s to end, because %s; check ctx.cancelled in long loops",
                        thread.name,
                        self.error,
                    )
                thread.join(_PATIENCE_SECS)
        self._threads.clear()

    def settle(self) -> None:
        """Join all threads and raise the first failure, or CancelledError if it came from above."""
        self.join()
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to these frames
        self.check()


def task_failed(where: object, task: Task | None, step: Step, error: Exception) -> RelayError:
    """Return the error for a failed step; torchrelay's own errors are unchanged."""
    name = step_name(step) or "an unnamed step"
    of_task = f" of task {task.full_name!r}" if task is not None else ""
    return error if isinstance(error, RelayError) else _failure(f"step {name!r}{of_task}", where, error)


@contextmanager
def naming(what: str, where: object) -> Iterator[None]:
    """Convert an exception of user code to an error that names the failed part and place."""
    try:
        yield
    except RelayError:
        raise
    except Exception as error:
        raise _failure(what, where, error) from error


def _failure(what: str, where: object, error: Exception) -> TaskFailedError:
    """Return the error for a failure of user code, with the traceback from that code on."""
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    failed = TaskFailedError(f"{what} failed on {where}: {reason}")
    failed.__cause__ = error
    frames = error.__traceback__
    while frames is not None and "torchrelay" in frames.tb_frame.f_globals.get("__name__", ""):
        frames = frames.tb_next
    failed.details = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return failed


_END = object()
Agreed = Callable[[], tuple[int, int, int]]
"""Waits for all: whether a process has no batch left, the strongest request, whether a save is requested."""


class FlagsHandle(Protocol):
    """A posted agreement."""

    def wait(self) -> tuple[int, ...]:
        """Block until all processes have posted; return the maximum of every flag."""


class Agreeing(Protocol):
    """Agreements inside an epoch, as offered by sessions."""

    def agree_flags(self, flags: tuple[int, ...]) -> FlagsHandle:
        """Post this process's flags without blocking. All processes post in the same order."""


@dataclass(frozen=True)
class TaskRanks:
    """The ranks that run a task, seen by one of them.

    `group` is their process group. `agreeing` is None for a single rank, and for all ranks (`every`), which
    agree by the session. `counting`: all ranks run the task, or a parallel task with the same steps, so its
    loops may count steps of the job. `among` names the ranks.
    """

    group: Any = None
    agreeing: Agreeing | None = None
    every: bool = True
    counting: bool = True
    among: str = ALL


@dataclass(frozen=True)
class StepLoop:
    """One loop over the batches of a loader on one node.

    `counted` loops count steps and obey limits and stop requests; others run through unless there is a
    preemption. `polled` is False in threads of tasks and in tasks of some ranks, which do not react to a
    preemption. `agreeing` is None if no other process takes part. `loops` and `among` are compared between
    ranks that agree. `cursor` is the position of the node in the epoch. The loop raises CancelledError if a
    sibling failed, and Interrupted on a preemption.
    """

    state: RunState
    node: str
    loader: Iterable[Any]
    counted: bool
    agreeing: Agreeing | None
    siblings: Siblings
    polled: bool = True
    cursor: Cursor | None = None
    accumulate: int = 1
    """Batches per window; the last window may have fewer."""
    loops: Loops = field(default_factory=Loops)
    among: str = ALL

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches until all processes end."""
        if self.cursor is not None and self.cursor.comes_back(counted=self.counted) and self.state.put_back:
            self.state.put_back(self.node, self.agreeing)
        loop = None
        if self.cursor is not None:
            loop = self.cursor.enter(self.loader, counted=self.counted, evaluates=self.evaluates)
        if loop is None and self.accumulate > 1:
            loop = Loop(self.loader, counted=True)  # windows are counted without a cursor, too
        if self.counted and self.state.must_end(self.node):
            return
        source = self.loader if loop is None else loop.source
        if self.counted:
            self._begin_counted(loop)
        if self.agreeing is None:
            yield from self._alone(source, loop)
            return
        even = is_epoch_loader(self.loader)
        everywhere = self.cursor is not None and self.cursor.everywhere and self.state.requests is not None
        if even and not (self.counted or (self.polled and everywhere)):  # nothing to exchange
            for batch in source:
                yield self._begin(batch, loop, closes=self._closes_window(loop))
            return
        made, early = self.loops.enter(self.among, type(self.loader).__name__), True
        agree = partial(self._agree, self.agreeing, made)
        try:
            for batch in (self._even if even else self._uneven)(source, loop, agree):
                self.loops.begin(made)
                yield batch
            early = False
        finally:
            self.loops.leave(made, early=early)

    @property
    def evaluates(self) -> bool:
        """True if the program may have swapped the trained weights during this loop."""
        import torch

        return not self.counted or not torch.is_grad_enabled()

    def _begin_counted(self, loop: Loop | None) -> None:
        """Note the expected steps, and warn of workers' random states, or of an index, that is not saved."""
        kept = getattr(self.loader, "persistent_workers", False) and not hasattr(self.loader, "state_dict")
        if kept and self.state.first_time(f"workers of {self.node}"):
            logger.warning(
                "DataLoader(persistent_workers=True) restarts its workers on a resume, so batches come in "
                "another order than without one; remove that option"
            )
        if loop is not None and loop.in_window and self.accumulate == 1:
            logger.warning(
                "this loop resumes after %d batches, with gradients of an open window: an index by "
                "enumerate() begins at 0 again; use ctx.steps(loader, accumulate=n), ctx.window_end instead",
                loop.taken,
            )
        if self.polled and self.state.requests is not None:
            self.state.requests.steps = True
        with suppress(Exception):  # a foreign loader may raise any error, or have no length
            length = len(self.loader)  # type: ignore[arg-type]
            self.state.expect_steps(self.node, max(length - (loop.taken if loop is not None else 0), 0))

    def _alone(self, source: Iterable[Any], loop: Loop | None) -> Iterator[Any]:
        for batch, last in self._with_last(source):
            closes = self._closes_window(loop, last=last)
            yield self._begin(batch, loop, closes=closes)
            if self._ended(self._urgency(closes=closes) if self.polled else NOT_ASKED, loop):
                return
            self._save_if(closes and self._save_wanted(), loop)

    def _even(self, source: Iterable[Any], loop: Loop | None, agree: Callable[..., Agreed]) -> Iterator[Any]:
        """Iterate with equal numbers of batches: only stop requests are exchanged, every `agree_every` steps.

        Within a window they count only if the time is too short to wait for its end.
        """
        every = self.state.agree_every
        since = every - 1
        for index, batch in enumerate(source):
            closes, since = self._closes_window(loop), since + 1
            asking = since >= every if closes else index % every == 0
            since = 0 if asking and closes else since
            agreed = agree(closes=closes) if asking else None
            yield self._begin(batch, loop, closes=closes)
            _, urgency, save = agreed() if agreed else (0, NOT_ASKED, 0)
            if self._ended(urgency, loop):
                return
            self._save_if(save, loop)

    def _uneven(
        self, source: Iterable[Any], loop: Loop | None, agree: Callable[..., Agreed]
    ) -> Iterator[Any]:
        """Prefetch one batch on each process; the first without one ends the loop for all."""
        batches = iter(source)
        ahead = next(batches, _END)
        agreed = agree(exhausted=ahead is _END, asks=False)
        while True:
            exhausted, urgency, save = agreed()
            if exhausted:
                if ahead is not _END and self.state.first_time(f"surplus of {self.node}"):
                    logger.warning(
                        "%s: other processes ran out of batches first; surplus batches here are dropped in "
                        "every epoch. EpochLoader gives all processes the same number of steps and drops "
                        "nothing.",
                        self.node,
                    )
                return
            if self._ended(urgency):
                return
            self._save_if(save)
            batch, ahead = ahead, next(batches, _END)
            closes = self._closes_window(loop, last=ahead is _END)
            agreed = agree(exhausted=ahead is _END, closes=closes)
            if self.accumulate > 1:  # the step must know now if it is the last one
                closes = bool(agreed()[0]) or closes
            yield self._begin(batch, loop, closes=closes)

    def _with_last(self, source: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield batches, each with a flag for the last one if windows need it."""
        if self.accumulate == 1 or isinstance(self.loader, Sequence) or is_epoch_loader(self.loader):
            yield from ((batch, False) for batch in source)
            return
        batches = iter(source)
        ahead = next(batches, _END)
        while ahead is not _END:
            batch, ahead = ahead, next(batches, _END)
            yield batch, ahead is _END

    def _closes_window(self, loop: Loop | None, *, last: bool = False) -> bool:
        """Return True if the next step is the last of its window."""
        if self.accumulate == 1 or last or loop is None:
            return True
        taken = loop.taken + 1
        return taken % self.accumulate == 0 or loop.ends_at(taken) or self.state.limits_next_step(self.node)

    def _urgency(self, *, closes: bool) -> int:
        """Return this process's request; an evaluation or a window is finished first if there is time."""
        if self.counted and closes and not self.evaluates:
            return self.state.urgency()
        requests = self.state.requests
        if requests is None or not self.polled:
            return NOT_ASKED
        return PREEMPT if requests.level(patient=True) == PREEMPT else NOT_ASKED

    def _save_wanted(self) -> bool:
        """Return True if this process requests a save in this loop, which all nodes must run."""
        alone = self.agreeing is None and self.polled
        everywhere = self.cursor is not None and self.cursor.everywhere
        return self.counted and not self.evaluates and (alone or everywhere) and self.state.save_wanted()

    def _save_if(self, wanted: int, loop: Loop | None = None) -> None:
        """Save here if a process requests it; after the last batch the end of the epoch does."""
        if wanted and self.state.save_now is not None and not (loop is not None and loop.exhausted):
            self.state.save_now()

    def _begin(self, batch: Any, loop: Loop | None, *, closes: bool) -> Any:
        self.siblings.check()
        self.state.check()
        if loop is not None:
            loop.taken += 1
        if self.counted:
            self.state.count_step(self.node)
            self.state.window_ends[self.node] = closes
        return batch

    def _ended(self, urgency: int, loop: Loop | None = None) -> bool:
        """Return True if this loop ends before its loader. Raises Interrupted on a preemption.

        Not after the last batch: code after the loop may need variables of the loop.
        """
        if urgency == PREEMPT:
            if loop is not None and loop.exhausted:
                return False
            if self.cursor is not None:
                self.cursor.leave()
            raise Interrupted
        if not self.counted:
            return False
        if urgency != NOT_ASKED:
            self.state.end_epoch_at(self.node, urgency)
        return self.state.must_end(self.node)

    def _agree(
        self,
        agreeing: Agreeing,
        made: LoopRecord,
        *,
        exhausted: bool = False,
        closes: bool = False,
        asks: bool = True,
    ) -> Agreed:
        """Post this process's values; the result raises UsageError if processes are in different loops."""
        urgency = self._urgency(closes=closes) if asks else NOT_ASKED
        number, save = made.number, asks and closes and self._save_wanted()
        handle = agreeing.agree_flags((number, -number, int(exhausted), urgency, int(save)))

        def wait() -> tuple[int, int, int]:
            most, least, exhausted, urgency, save = handle.wait()
            if most != -least:
                other = most if most != number else -least
                raise UsageError(
                    f"this rank is in loop {number + 1} of ctx.steps in this group, another one is in "
                    f"loop {other + 1}: {REMEDY}"
                )
            return exhausted, urgency, save

        return wait
