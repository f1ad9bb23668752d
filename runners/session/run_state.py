"""Current state of a run: epoch, steps, time, stop requests, metrics of this process, points within an epoch.

Points within an epoch come from rank 0 only, without communication. A value on a device is copied to host
memory asynchronously, and becomes a point when it has arrived. A window ends at a multiple of its steps, and
at the end of the epoch or a save in it, so that no point depends on data that a resume does not have.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.state.restore.gradients import Gradients
from torchrelay.errors import MissingMetricError, RelayError, UsageError
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.random import RandomStreams
from torchrelay.records import dataclass
from torchrelay.runners.session.metrics import Accumulator, MetricLog, SentValue
from torchrelay.runners.session.mid_epoch import Cursor, MidEpochPosition
from torchrelay.runners.session.stop_requests import ASKED, NOT_ASKED, TIME_IS_UP, Requests

if TYPE_CHECKING:
    from torchrelay.checkpoint.format.position import Facts
    from torchrelay.runners.session.metrics import Number


EVERY_SECS = 10.0
"""Interval of polls for arrived values during an epoch."""
Row = tuple[int, int, Mapping[str, float]]
"""Epoch, steps of all epochs, and the values at that step."""


@dataclass
class _Window:
    """Values of one metric since its last point, up to the step `end`."""

    every: int
    end: int
    running: Accumulator


class StepPoints:
    """Points of a run, in one process. `deliver` gets rows by ascending steps, in the training thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.deliver: Callable[[Sequence[Row]], None] | None = None
        self._clock, self._looked = clock, clock()
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._seen = 0
        self._sent: deque[tuple[int, int, dict[str, SentValue]]] = deque()

    def add(
        self, epoch: int, step: int, name: str, reduce: str, every: int, value: Number, weight: Number
    ) -> None:
        """Add a value logged in a step, and deliver arrived points if that was not done recently."""
        with self._lock:
            if step > self._seen:
                self._seen = step
                self._end([(name, one.end) for name, one in self._windows.items() if one.end < step], epoch)
            end = ((step - 1) // every + 1) * every
            window = self._windows.setdefault(name, _Window(every, end, Accumulator.of(reduce)))
            if window.every != every:
                raise UsageError(
                    f"metric {name!r} is logged with every={window.every} and with every={every}: use one "
                    "interval"
                )
            window.running.add(value, weight)
        late = self._clock() - self._looked >= EVERY_SECS
        if late and threading.current_thread() is threading.main_thread():
            self.hand_over()

    def hand_over(self) -> None:
        """Deliver the points that have arrived; never blocks."""
        self._looked = self._clock()
        rows: list[Row] = []
        with self._lock:
            while self._sent and all(one.here() for one in self._sent[0][2].values()):
                rows.append(_row(*self._sent.popleft()))
        self._deliver(rows)

    def end(self, epoch: int, step: int) -> None:
        """Deliver everything at the end of the epoch or at a save in it."""
        with self._lock:
            self._end([(name, min(one.end, step)) for name, one in self._windows.items()], epoch)
            rows = [_row(*sent) for sent in self._sent]
            self._sent.clear()
        self._deliver(rows)

    def _deliver(self, rows: Sequence[Row]) -> None:
        filled = [row for row in rows if row[2]]
        if filled and self.deliver is not None:
            self.deliver(filled)

    def _end(self, ending: Sequence[tuple[str, int]], epoch: int) -> None:
        """End these windows and send their values."""
        for at in sorted({end for _, end in ending}):
            names = [name for name, end in ending if end == at]
            sent = {name: SentValue(self._windows.pop(name).running) for name in names}
            self._sent.append((epoch, at, sent))


def _row(epoch: int, step: int, sent: Mapping[str, SentValue]) -> Row:
    return epoch, step, {name: value for name, one in sent.items() if (value := one.result()) is not None}


def check_interval(every: Any, step: int) -> None:
    """Raise UsageError for an invalid interval, and if no steps are counted."""
    if type(every) is not int or every < 1:
        raise UsageError(f"invalid every={every!r:.80}: expected a number of steps, from 1")
    if step < 1:
        raise UsageError(
            "every= counts steps of ctx.steps(loader), but none was counted yet: log without every=, or in "
            "such a loop"
        )


class LastMetrics(dict[str, float]):
    """Metrics by name; a missing one raises MissingMetricError."""

    def __missing__(self, name: str) -> float:
        known = ", ".join(sorted(self)) or "none, because they are reduced when an epoch ends"
        raise MissingMetricError(f"no metric {name!r} was reduced yet; there are: {known}", name)


class RunState:
    """State of a run in one process. Mutable.

    `epoch` is the current epoch (0 before the first). `limit_steps` and `limit_secs` are totals over all
    attempts that end the running epoch at its next step; `agree_every` is the number of steps between two
    checks of stop requests. Emulated nodes of one process count their steps separately.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        attempt: int = 0,
        run_dir: str | None = None,
        agree_every: int = 1,
        limit_steps: int | None = None,
        limit_secs: float | None = None,
        elapsed_before_secs: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if agree_every < 1:
            raise UsageError(f"invalid agree_every={agree_every}: expected a number of steps, at least 1")
        self.seed, self.attempt, self.run_dir = seed, attempt, run_dir
        self.agree_every, self.limit_steps, self.limit_secs = agree_every, limit_steps, limit_secs
        self.epoch = 0
        self.measured: dict[str, float] = {}
        """The reduced metrics of the newest finished epoch; empty while an epoch runs."""
        self.metrics: dict[str, float] = LastMetrics()  # the last reduced value of every metric of the run
        self.ended_early: str | None = None
        self.exit_code: int | None = None
        self.fenced: RelayError | None = None  # another job has taken the directory: raised at the next step
        self._clock = clock
        self._started = clock() - elapsed_before_secs
        self.epoch_began_secs = clock()  # start of the running epoch by the monotonic clock
        self._first_step = self._steps_before_epoch = 0
        self._steps: dict[str, int] = {}
        self._last_step: int | None = None
        self._steps_expected: int | None = None
        self._logs: dict[str, MetricLog] = {}
        self.points = StepPoints()
        self._said: set[str] = set()
        self._loaders: dict[int, tuple[weakref.ref[object], int]] = {}
        """The loaders of counted loops, and the first epoch of each."""
        self.requests: Requests | None = None  # requests to end early; None outside of a run
        self.tracked: TaskGroup | None = None
        """The group whose tasks are tracked, so that they can be interrupted and resumed."""
        self.put_back: Callable[[str, Any], None] | None = None
        """Called by a node and its agreement when it reaches the interrupted loop."""
        self.crashed: Callable[[BaseException], None] | None = None
        """Called in the process in which a task of the epoch failed, before the others are notified."""
        self.save_now: Callable[[], None] | None = None
        """Saves the step that all processes agreed on; None where a step cannot be saved."""
        self._cursors: dict[str, Cursor] = {}
        self.window_ends: dict[str, bool] = {}
        """By node: True if its current step is the last of its accumulation window."""

    def leave_epoch(self) -> None:
        """Release what was needed for the tasks of the epoch."""
        self.tracked = self.put_back = self.save_now = self.crashed = None

    # Time

    @property
    def elapsed_secs(self) -> float:
        """Seconds of running time over all attempts."""
        return self._clock() - self._started

    @property
    def secs_left(self) -> float | None:
        """Seconds to the time limit; None without one."""
        return None if self.limit_secs is None else max(self.limit_secs - self.elapsed_secs, 0.0)

    # Epochs and steps

    def begin_epoch(self, epoch: int, *, step: int = 0, total_steps: int | None = None) -> None:
        """Start epoch `epoch` (from 1), `step` steps into it after a mid-epoch resume.

        `total_steps` counts all epochs so far; default: what this object has counted, without `setup` and
        `init`.
        """
        if total_steps is None:
            total_steps = (self.total_steps if self.epoch else 0) + step
        self.epoch, self._first_step = epoch, step
        self._steps_before_epoch = total_steps - step
        self._steps, self._cursors, self.measured = {}, {}, {}
        self._last_step = self._steps_expected = self.ended_early = None
        self.epoch_began_secs = self._clock()

    def take(self, facts: Facts, epoch: int) -> None:
        """Continue counting from a loaded position."""
        self._started = self._clock() - facts.elapsed_secs
        self.begin_epoch(epoch, total_steps=facts.total_steps)
        self.measured, self.metrics = dict(facts.metrics), LastMetrics(facts.last_metrics)
        if self.seed is None:
            self.seed = facts.seed

    def continue_at(
        self, node: str, place: MidEpochPosition, streams: RandomStreams | None, gradients: Gradients | None
    ) -> None:
        """Resume a hosted node at this position of the epoch that begins."""
        self._steps[node] = place.steps
        self._cursors[node] = Cursor(self.log_of(node), place, streams, gradients)

    def cursor_of(self, node: str, group: TaskGroup | None = None) -> Cursor | None:
        """Return the cursor of `node` in the tracked group; None if that group does not run."""
        if self.tracked is None or group not in (None, self.tracked):
            return None
        if node not in self._cursors:
            self._cursors[node] = Cursor(self.log_of(node))
        return self._cursors[node]

    @property
    def step(self) -> int:
        """Number of steps of the running epoch begun by the most advanced hosted node."""
        return max(list(self._steps.values()), default=self._first_step)

    @property
    def steps_of_epoch(self) -> int | None:
        """Expected number of steps of the running epoch, as far as known."""
        expected, limit = self._steps_expected, self.limit_steps
        if expected is None or limit is None:
            return expected
        return min(expected, max(limit - self._steps_before_epoch, 0))

    def expect_steps(self, node: str, more: int) -> None:
        """Record that `node` enters a loop with `more` steps, for progress displays."""
        self._steps_expected = max(self._steps_expected or 0, self.step_of(node) + more)

    @property
    def total_steps(self) -> int:
        """Number of steps of all epochs and attempts."""
        return self._steps_before_epoch + self.step

    @property
    def steps_at_begin(self) -> int:
        """Number of steps of all epochs at the start of the running one."""
        return self._steps_before_epoch + self._first_step

    def step_of(self, node: str) -> int:
        """Return the number of steps of the running epoch that `node` has begun."""
        return self._steps.get(node, self._first_step)

    def total_steps_of(self, node: str) -> int:
        """Return the number of steps of all epochs that `node` has begun."""
        return self._steps_before_epoch + self.step_of(node)

    def count_step(self, node: str) -> None:
        """Count the next step of `node`."""
        self._steps[node] = self.step_of(node) + 1

    # Ending the running epoch early

    def check(self) -> None:
        """Raise the error that ends this process at its next step, if any."""
        if self.fenced is not None:
            raise self.fenced

    def urgency(self) -> int:
        """Return this process's request for the next agreement: NOT_ASKED, TIME_IS_UP, ASKED or PREEMPT."""
        asked = self.requests.level() if self.requests is not None else NOT_ASKED
        if asked != NOT_ASKED:
            return asked
        late = self.limit_secs is not None and self.elapsed_secs >= self.limit_secs
        return TIME_IS_UP if late else NOT_ASKED

    def save_wanted(self) -> bool:
        """Return True if this process was asked for a save that is possible at a step."""
        return self.save_now is not None and self.requests is not None and self.requests.save_wanted

    def end_epoch_at(self, node: str, agreed: int) -> None:
        """End the running epoch at the current step of `node`, as all processes agreed."""
        time_is_up = f"the time limit of {self.limit_secs} s is reached"
        own = self.requests.reason() if self.requests is not None else None
        asked = own or "another process asked to stop"
        self._end_early(node, asked if agreed == ASKED else time_is_up)

    def must_end(self, node: str) -> bool:
        """Return True if `node` takes no further step in this epoch; identical on all nodes."""
        if self.limit_steps is not None and self.total_steps_of(node) >= self.limit_steps:
            self._end_early(node, f"the limit of {self.limit_steps} steps is reached")
        return self._last_step is not None and self.step_of(node) >= self._last_step

    def limits_next_step(self, node: str) -> bool:
        """Return True if the next step of `node` is the last that the step limit allows."""
        return self.limit_steps is not None and self.total_steps_of(node) + 1 >= self.limit_steps

    def _end_early(self, node: str, reason: str) -> None:
        if self._last_step is None:
            self._last_step, self.ended_early = self.step_of(node), reason

    # Metrics and messages

    def log_of(self, node: str) -> MetricLog:
        """Return the metric log of `node` in the running epoch."""
        return self._logs.setdefault(node, MetricLog())

    def own_metrics(self) -> dict[str, float]:
        """Return this process's unreduced metrics of the running epoch without blocking."""
        return {name: one for log in list(self._logs.values()) for name, one in log.running().items()}

    def comes_again(self, loader: object) -> bool:
        """Return True if a loop of an earlier epoch had this loader, and it takes weak references."""
        with suppress(TypeError):
            known, epoch = self._loaders.setdefault(id(loader), (weakref.ref(loader), self.epoch))
            if known() is loader:
                return epoch < self.epoch
            self._loaders[id(loader)] = weakref.ref(loader), self.epoch
        return False

    def first_time(self, topic: str) -> bool:
        """Return True on the first call with `topic` in this run, for messages printed once."""
        new = topic not in self._said
        self._said.add(topic)
        return new

    def __repr__(self) -> str:
        return f"RunState(epoch={self.epoch}, step={self.step}, attempt={self.attempt})"
