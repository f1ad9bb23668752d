"""Loops over `ctx.steps(loader)` that all processes begin and end together, and threads of one node.

Information needed before a step begins:

- Step limits are the same on all processes and need no communication.
- The length of an EpochLoader is the same on all processes. For other loaders each process prefetches one
batch
  and reports if it has one.
- Stop requests and time limits are known to one process first. A preemption ends the tasks at the step by
  Interrupted; others end the loop, and with it the epoch.
- A requested save is made by all processes at the same step.
- In a task of some ranks only these agree about the end of their batches; requests wait for a loop of all
ranks
  or the end of the epoch.
- Requests wait for the end of an accumulation window unless the time is too short.
- A rank that leaves alone by `break`, or runs a loop that others do not, is found by comparison (`loops`).

The information is one maximum over all processes, posted before a step and awaited after it, so that it
overlaps with the step: a stop requested during one step ends the next one.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from types import TracebackType
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
    """Threads of one node's run, and the first failure among them and their starting thread.

    With `above` (for the instances of a task) they also end when a sibling there fails.
    """

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
    """Return the error for a failed step."""
    name = step_name(step) or "an unnamed step"
    of_task = f" of task {task.full_name!r}" if task is not None else ""
    return _program_failed(f"step {name!r}{of_task}", where, error)


@contextmanager
def naming(what: str, where: object) -> Iterator[None]:
    """Convert an exception of user code to an error that names the failed part and place."""
    try:
        yield
    except RelayError:
        raise
    except Exception as error:
        raise _program_failed(what, where, error) from error


def _program_failed(what: str, where: object, error: Exception) -> RelayError:
    """Return the error for a failure of user code; torchrelay's own errors are unchanged."""
    if isinstance(error, RelayError):
        return error
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    failed = TaskFailedError(f"{what} failed on {where}: {reason}")
    failed.__cause__ = error
    failed.details = "".join(traceback.format_exception(type(error), error, _users_part(error)))
    return failed


def _users_part(error: Exception) -> TracebackType | None:
    """Return the traceback from the user's step on."""
    frames = error.__traceback__
    while frames is not None and "torchrelay" in frames.tb_frame.f_globals.get("__name__", ""):
        if frames.tb_next is None:
            return error.__traceback__
        frames = frames.tb_next
    return frames or error.__traceback__


_END = object()


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
        self._warn_of_workers()
        source = self.loader if loop is None else loop.source
        if self.counted:
            self._expect_steps(loop)
        if self.counted and self.polled and self.state.requests is not None:
            self.state.requests.steps = True
        if self.agreeing is None:
            yield from self._alone(source, loop)
        elif is_epoch_loader(self.loader) and not self._asks:  # equal number of batches, nothing to exchange
            for batch in source:
                yield self._begin(batch, loop, closes=self._closes_window(loop))
        else:
            yield from self._together(source, loop, self.agreeing)

    def _together(self, source: Iterable[Any], loop: Loop | None, agreeing: Agreeing) -> Iterator[Any]:
        """Iterate over batches while the loop is recorded for comparison with other ranks."""
        made, early = self.loops.enter(self.among, type(self.loader).__name__), True
        together = _Together(agreeing, made)
        try:
            even = is_epoch_loader(self.loader)
            for batch in (self._even if even else self._uneven)(source, loop, together):
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

    def _warn_of_workers(self) -> None:
        """Warn once that workers of a loader keep random states outside of checkpoints."""
        kept = getattr(self.loader, "persistent_workers", False) and not hasattr(self.loader, "state_dict")
        if self.counted and kept and self.state.first_time(f"workers of {self.node}"):
            logger.warning(
                "DataLoader(persistent_workers=True) restarts its workers on a resume, so batches come in "
                "another order than without one; use EpochLoader, or remove that option"
            )

    def _expect_steps(self, loop: Loop | None) -> None:
        """Record how many steps this loop has left, if known, for progress displays."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except Exception:  # a foreign loader may raise any error, or have no length
            return
        self.state.expect_steps(self.node, max(length - (loop.taken if loop is not None else 0), 0))

    def _alone(self, source: Iterable[Any], loop: Loop | None) -> Iterator[Any]:
        """Iterate in a single process."""
        for batch, last in self._with_last(source):
            closes = self._closes_window(loop, last=last)
            yield self._begin(batch, loop, closes=closes)
            if self._ended(self._urgency(closes=closes) if self.polled else NOT_ASKED, loop):
                return
            self._save_if(closes and self._save_wanted(), loop)

    @property
    def _asks(self) -> bool:
        """True if a loop with equal numbers of batches exchanges requests."""
        everywhere = self.cursor is not None and self.cursor.everywhere and self.state.requests is not None
        return self.counted or (self.polled and everywhere)

    def _even(self, source: Iterable[Any], loop: Loop | None, agreeing: _Together) -> Iterator[Any]:
        """Iterate with equal numbers of batches: only stop requests are exchanged, every `agree_every` steps.

        Within a window they count only if the time is too short to wait for its end.
        """
        every = self.state.agree_every
        since = every - 1
        for index, batch in enumerate(source):
            closes, since = self._closes_window(loop), since + 1
            asking = since >= every if closes else index % every == 0
            since = 0 if asking and closes else since
            told = None
            if asking:
                urgency = self._urgency(closes=closes)
                told = agreeing.agree(False, urgency, closes and self._save_wanted())
            yield self._begin(batch, loop, closes=closes)
            _, urgency, save = told() if told else (0, NOT_ASKED, 0)
            if self._ended(urgency, loop):
                return
            self._save_if(save, loop)

    def _uneven(self, source: Iterable[Any], loop: Loop | None, agreeing: _Together) -> Iterator[Any]:
        """Prefetch one batch on each process; the first without one ends the loop for all."""
        batches = iter(source)
        ahead = next(batches, _END)
        told = agreeing.agree(ahead is _END, NOT_ASKED, False)
        while True:
            exhausted, urgency, save = told()
            if exhausted:
                self._warn_of_surplus(dropped=ahead is not _END)
                return
            if self._ended(urgency):
                return
            self._save_if(save)
            batch, ahead = ahead, next(batches, _END)
            closes = self._closes_window(loop, last=ahead is _END)
            urgency = self._urgency(closes=closes)
            told = agreeing.agree(ahead is _END, urgency, closes and self._save_wanted())
            if self.accumulate > 1:  # the step must know now if it is the last one
                closes = bool(told()[0]) or closes
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

    def _urgency(self, *, closes: bool = True) -> int:
        """Return this process's request for an agreement; an evaluation is finished first if there is time.

        The same holds for a step within a window, whose end is near.
        """
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
        """Count and yield the next batch."""
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

    def _warn_of_surplus(self, *, dropped: bool) -> None:
        """Warn once that surplus batches are dropped."""
        if dropped and self.state.first_time(f"surplus of {self.node}"):
            logger.warning(
                "%s: other processes ran out of batches first; surplus batches here are dropped in every "
                "epoch. EpochLoader gives all processes the same number of steps and drops nothing.",
                self.node,
            )


@dataclass(frozen=True)
class _Together:
    """Agreements of one loop; each includes the number of the loop."""

    agreeing: Agreeing
    made: LoopRecord

    def agree(self, exhausted: bool, urgency: int, save: bool) -> Callable[[], tuple[int, int, int]]:
        """Post this process's values; return a function that waits for the others.

        Its result: a process has no batch left, the strongest request, a save is requested. Raises UsageError
        if processes are in different loops.
        """
        number = self.made.number
        handle = self.agreeing.agree_flags((number, -number, int(exhausted), urgency, int(save)))

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
