"""Observers of a run: the terminal, logs of ranks, `torchrelay top`, and trackers in threads of their own.

They receive events but never change what a run does.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrelay.errors import StorageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.runtime import Worker, WorkItem
from torchrelay.jobs.session import Peers
from torchrelay.metadata.run_directory import RunDirectory, without_password
from torchrelay.metadata.sinks.text import MetricSink, TrackedRun
from torchrelay.runners.monitoring.progress import Progress
from torchrelay.runners.monitoring.text import EVERY_SECS, RankLog, level_wanted
from torchrelay.runners.session.run_state import Row, RunState
from torchrelay.runners.session.stop import last_epoch_of

if TYPE_CHECKING:
    from torchrelay.runners.training.journal import Journal


class LateError(Exception):
    """A call did not finish in time; it continues in its thread."""


FAILURES = 3
"""Failures in a row after which a sink is not used any more in this attempt."""
PATIENCE_SECS = 120.0
"""Time limit of a sink: the other ranks wait for this one, for ten minutes at most."""


class Trackers:
    """Rank 0's sinks in one attempt; never raises. `warn` reports problems.

    Each sink has a thread; one that is late is not used any more.
    """

    def __init__(self, sinks: Sequence[MetricSink], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sinks = list(sinks)
        self._failures: dict[int, int] = {}
        self._workers = {id(sink): Worker(f"tracker {type(sink).__name__}") for sink in self._sinks}
        self._late: dict[int, WorkItem[object]] = {}

    def send(self, verb: str, *given: Any) -> None:
        """Call a method of all sinks that have it; a sink that failed too often is not used any more.

        One that cannot open, or cannot rewind and so would show two curves, has failed too often.
        """
        for sink in [one for one in self._sinks if callable(getattr(one, verb, None))]:
            if self._call(sink, verb, *given):
                self._failures.pop(id(sink), None)
            elif verb in ("open", "rewind") or self._failures[id(sink)] >= FAILURES:
                self._sinks.remove(sink)
                if verb != "open":
                    self._failure(sink, "close")
                self._workers[id(sink)].stop(0)

    def close(self) -> None:
        """End the attempt; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._call(sink, "close")
            self._workers[id(sink)].stop(0)

    def _call(self, sink: MetricSink, verb: str, *given: Any) -> bool:
        """Call a sink; returns False after a warning if it failed."""
        error = self._failure(sink, verb, *given)
        if error is None:
            return True
        count = FAILURES if isinstance(error, LateError) else self._failures.get(id(sink), 0) + 1
        self._failures[id(sink)] = count
        off = verb in ("open", "rewind") or (verb in ("log", "log_steps") and count >= FAILURES)
        then = "; it is not used any more in this attempt" if off else ""
        text = without_password(str(error)).strip().splitlines()[:1]  # some libraries write pages
        kind = [] if isinstance(error, LateError) else [type(error).__name__]
        reason = ": ".join([*kind, *(f"{line:.300}" for line in text)])
        self._warn(f"the tracker {type(sink).__name__} failed at {verb}: {reason}{then}")
        return False

    def _failure(self, sink: MetricSink, verb: str, *given: Any) -> BaseException | None:
        """Return the error of a call; LateError if it or an earlier one is not finished in time."""
        late = self._late.get(id(sink))
        if late is not None and not late.over.is_set():
            return LateError("an earlier call is not finished")
        with _streams_kept():
            item = self._workers[id(sink)].submit(lambda: getattr(sink, verb)(*given))
            if item is None:
                return LateError("this process cannot start more threads")
            if item.over.wait(PATIENCE_SECS):
                return item.error
        self._late[id(sink)] = item
        return LateError(f"it was not finished after {PATIENCE_SECS:g} s")


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Restore the random streams: a sink must not change the training."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    before = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and before is not None:
            numpy.random.set_state(before)


OTHERS_SECS = 60.0
"""Interval of lines in the logs of other ranks: thousands of ranks may share a file system."""


class Onlookers:
    """Observers of one train call in one process; files need a run directory, sinks are on rank 0."""

    def __init__(
        self,
        run: RunDirectory | None,
        peers: Peers,
        sinks: Sequence[MetricSink] = (),
        every_secs: float = EVERY_SECS,
    ) -> None:
        self._run, self._first = run, peers.rank == 0
        self._sinks = sinks if self._first else ()
        self._log = RankLog(peers.rank, peers.size, socket.gethostname())
        every = every_secs if self._first else max(every_secs, OTHERS_SECS)
        self.progress = Progress(self._log, talks=self._first, every_secs=every, level=level_wanted())
        self._trackers = Trackers((), lambda text: None)
        self._journal: Journal | None = None
        self._state: RunState | None = None

    def begin(self) -> None:
        """Capture log lines and warnings."""
        self._log.begin()

    def watch(self, state: RunState, job: Job, journal: Journal) -> None:
        """After the log is held and the attempt known: start progress and trackers."""
        note = None
        self._state = state
        if self._run is not None:
            self._log.open(self._run.path / "logs", state.attempt)
            if self._first:
                note = partial(_note_live, self._run, state)
                self._trackers = Trackers(self._sinks, journal.warn)
                name, uuid = job.name or self._run.name, journal.run_id or ""
                run = TrackedRun(self._run.path, self._run.name, name, uuid)
                self._trackers.send("open", run, state.attempt)
                state.points.deliver = self._points
                self._journal = journal
        self.progress.begin(state, last_epoch_of(job.stop_conditions), note)

    def started(self, epoch: int, step: int) -> None:
        """After the state is loaded: the run continues after `epoch`, at `step` steps in total."""
        if self._journal is not None:
            self._journal.replace_steps_after(step)
        self._trackers.send("rewind", epoch, step)

    def _points(self, rows: Sequence[Row]) -> None:
        if self._journal is not None:
            self._journal.step_points(rows)
        self._trackers.send("log_steps", [(epoch, step, dict(values)) for epoch, step, values in rows])

    def reduced(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a finished epoch.

        Trackers get them before the save: if a crash comes in between, the run resumes before this epoch and
        rewinds them. In the other order the epoch would be missing.
        """
        state.points.end(state.epoch, state.total_steps)
        self._trackers.send("log", state.epoch, state.total_steps, dict(metrics))

    def close(self) -> None:
        """End the call; a second call does nothing."""
        if self._state is not None:
            self._state.points.hand_over()  # of a failed epoch what has arrived
            self._state.points.deliver = None
        self._trackers.close()
        self.progress.close()
        self._log.end()


def _note_live(run: RunDirectory, state: RunState, live: dict[str, Any]) -> None:
    """Write the current state to `live.json` while this process holds the directory."""
    if state.fenced is None:
        who = {"attempt": state.attempt, "host": socket.gethostname(), "pid": os.getpid()}
        with suppress(StorageError):  # the journal reports such errors
            run.write_live({**who, **live})
