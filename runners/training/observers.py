"""Everybody who looks on: the terminal, ranks' own logs, `torchrelay top`, trackers in own threads.

They are told what happens and have no say: nothing of theirs changes what a run does.
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
    """A call was not over in time; it goes on."""


class OneThread:
    """Makes calls one after the other, always in the same thread, which no exit of the process waits for."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._late: WorkItem[object] | None = None

    def failure(self, call: Callable[[], object], wait_secs: float) -> BaseException | None:
        """What a call raised, None if it was well; LateError if it, or one before, is not over in time."""
        if self._late is not None and not self._late.over.is_set():
            return LateError("an earlier call is not over")
        mine = self._worker.submit(call)
        if mine is None:
            return LateError("this process gets no more threads")
        if mine.over.wait(wait_secs):
            return mine.error
        self._late = mine
        return LateError(f"it was not over after {wait_secs:g} s")

    def end(self) -> None:
        """End the thread when the last call is over; a later one has another thread."""
        self._worker.stop(0)


FAILURES = 3
"""So many in a row, and a sink is left alone for the rest of the attempt."""
PATIENCE_SECS = 120.0
"""How long a sink may take: the other ranks wait for this one, and give it up after ten minutes."""


class Trackers:
    """Rank 0's sinks in one attempt; nothing here raises. `warn` says what went wrong.

    Each sink has a thread of its own: one that is late is left alone, and nobody waits for it again.
    """

    def __init__(self, sinks: Sequence[MetricSink], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sinks = list(sinks)
        self._failures: dict[int, int] = {}
        self._threads = {id(sink): OneThread(f"tracker {type(sink).__name__}") for sink in self._sinks}

    def open(self, run: TrackedRun, attempt: int) -> None:
        """A sink that cannot be opened gets nothing in this attempt."""
        for sink in list(self._sinks):
            if not self._tell(sink, "open", run, attempt):
                self._sinks.remove(sink)
                self._threads[id(sink)].end()

    def rewind(self, epoch: int, step: int) -> None:
        """The run goes on from here; a sink that cannot go back would show two curves and is left alone."""
        for sink in list(self._sinks):
            if not self._tell(sink, "rewind", epoch, step):
                self._leave(sink)

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """An epoch is over."""
        self._log("log", epoch, step, dict(metrics))

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Points within an epoch, for the sinks that take such."""
        self._log("log_steps", [(epoch, step, dict(values)) for epoch, step, values in rows])

    def _log(self, verb: str, *given: Any) -> None:
        for sink in [one for one in self._sinks if callable(getattr(one, verb, None))]:
            if self._tell(sink, verb, *given):
                self._failures.pop(id(sink), None)
            elif self._failures[id(sink)] >= FAILURES:
                self._leave(sink)

    def close(self) -> None:
        """The attempt is over; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._tell(sink, "close")
            self._threads[id(sink)].end()

    def _tell(self, sink: MetricSink, verb: str, *given: Any) -> bool:
        error = self._failure(sink, verb, *given)
        if error is None:
            return True
        count = FAILURES if isinstance(error, LateError) else self._failures.get(id(sink), 0) + 1
        self._failures[id(sink)] = count
        off = verb in ("open", "rewind") or (verb in ("log", "log_steps") and count >= FAILURES)
        then = "; it gets nothing more in this attempt" if off else ""
        self._warn(f"the tracker {type(sink).__name__} failed at {verb}: {_reason(error)}{then}")
        return False

    def _leave(self, sink: MetricSink) -> None:
        """Close it, unless it is late; it was said that it fails, so nothing is said of that."""
        self._sinks.remove(sink)
        self._failure(sink, "close")
        self._threads[id(sink)].end()

    def _failure(self, sink: MetricSink, verb: str, *given: Any) -> BaseException | None:
        with _streams_kept():
            return self._threads[id(sink)].failure(lambda: getattr(sink, verb)(*given), PATIENCE_SECS)


def _reason(error: BaseException) -> str:
    """The first line of what a sink raised: some libraries write pages."""
    text = without_password(str(error)).strip().splitlines()
    if isinstance(error, LateError):
        return text[0]
    return f"{type(error).__name__}: {text[0]:.300}" if text else type(error).__name__


@contextmanager
def _streams_kept() -> Iterator[None]:
    """What a sink draws at random must not move the streams of the training: a resumed run would differ."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    before = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and before is not None:
            numpy.random.set_state(before)


OTHERS_SECS = 60.0
"""The interval of the other ranks' lines, in their own files: thousands of ranks may share a file system."""


class Onlookers:
    """Those of one train call in one process; files are for runs with a directory, sinks for rank 0."""

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
        """Listen to what is said and warned of."""
        self._log.begin()

    def watch(self, state: RunState, job: Job, journal: Journal) -> None:
        """The run is ours and its attempt is known."""
        note = None
        self._state = state
        if self._run is not None:
            self._log.open(self._run.path / "logs", state.attempt)
            if self._first:
                note = partial(_note_live, self._run, state)
                self._trackers = Trackers(self._sinks, journal.warn)
                name, uuid = job.name or self._run.name, journal.run_id or ""
                self._trackers.open(TrackedRun(self._run.path, self._run.name, name, uuid), state.attempt)
                state.points.deliver = self._points
                self._journal = journal
        self.progress.begin(state, last_epoch_of(job.stop_conditions), note)

    def goes_on(self, epoch: int, step: int) -> None:
        """The state stands: the run goes on after `epoch`, at `step` steps in all."""
        if self._journal is not None:
            self._journal.steps_go_on(step)
        self._trackers.rewind(epoch, step)

    def _points(self, rows: Sequence[Row]) -> None:
        """Points within an epoch have come."""
        if self._journal is not None:
            self._journal.step_points(rows)
        self._trackers.log_steps(rows)

    def reduced(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """The tasks of an epoch are over.

        Trackers hear it before the save: after a crash between the two the run goes on before this epoch and
        takes it back; the other way round it would be missing for ever.
        """
        state.points.end(state.epoch, state.total_steps)
        self._trackers.log(state.epoch, state.total_steps, metrics)

    def epoch_done(self, metrics: Mapping[str, float]) -> None:
        """An epoch is over, and its save, unless that goes on behind the training."""
        self.progress.epoch(metrics)

    def close(self) -> None:
        """The call is over, however it ended; a second call does nothing."""
        if self._state is not None:
            self._state.points.hand_over()  # of an epoch that failed what is here
            self._state.points.deliver = None
        self._trackers.close()
        self.progress.close()
        self._log.end()


def _note_live(run: RunDirectory, state: RunState, sight: dict[str, Any]) -> None:
    """Leave what is seen in `live.json`, as long as the directory is ours."""
    if state.fenced is None:
        who = {"attempt": state.attempt, "host": socket.gethostname(), "pid": os.getpid()}
        with suppress(StorageError):  # the run's own notes tell of that
            run.write_live({**who, **sight})
