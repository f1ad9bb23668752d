"""Everybody who looks on: the person at the terminal, the ranks' own logs, `torchrelay top`, the trackers.

They are told what happens and have no say: nothing of theirs changes what a run does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrelay.errors import StorageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.sinks.base import MetricSink, TrackedRun
from torchrelay.runners.monitoring.progress import Progress
from torchrelay.runners.monitoring.rank_log import RankLog
from torchrelay.runners.monitoring.text import EVERY_SECS, level_wanted
from torchrelay.runners.monitoring.trackers import Trackers
from torchrelay.runners.session.metric_points import Row
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import last_epoch_of

if TYPE_CHECKING:
    from torchrelay.runners.training.journal import Journal

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
                note = _Noting(self._run, state)
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


class _Noting:
    """Leaves what is seen in `live.json`, as long as the directory is ours."""

    def __init__(self, run: RunDirectory, state: RunState) -> None:
        self._run, self._state = run, state
        self._who = {"attempt": state.attempt, "host": socket.gethostname(), "pid": os.getpid()}

    def __call__(self, sight: dict[str, Any]) -> None:
        if self._state.fenced is None:
            with suppress(StorageError):  # the run's own notes tell of that
                self._run.write_live({**self._who, **sight})
