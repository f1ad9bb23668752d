"""What a run writes about itself: status, events, metrics, and lines for the person who watches.

Rank 0 writes; the other ranks only know what they need for their own decisions. Without a run
directory only the lines remain.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.lease import process_here
from torchrelay.checkpoint.log.view import LeaseInfo, Look
from torchrelay.errors import DirectoryInUseError, PreemptedError, StorageError, UsageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers, decide, warn
from torchrelay.metadata.fs import finite
from torchrelay.metadata.run_directory import RunDirectory, State
from torchrelay.runners.distributed.launcher_status import notes, write_run
from torchrelay.runners.monitoring.progress import Progress
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict
from torchrelay.runners.training.plan import Choice, RunResult

TAIL_PARTS = ("upload", "download", "exit")
ENDED: tuple[State, ...] = ("FINISHED", "STOPPED")
"""The states of a run whose end is noted."""


class SaveWarning(UserWarning):
    """An epoch was not saved; training goes on."""


Aside = Callable[[Callable[[], None]], None]
"""Does what need not be done at once (`Background.aside`)."""


def at_once(work: Callable[[], None]) -> None:
    """Do it now."""
    work()


class Journal:
    """Notes the life of one run."""

    def __init__(
        self, run: RunDirectory | None, peers: Peers, progress: Progress, aside: Aside = at_once
    ) -> None:
        self.run = run
        self.peers = peers
        self.progress = progress
        self.run_id: str | None = None
        self.aside = aside
        self._generation: int | None = None
        self._branch = 0
        self._epoch: int | None = None
        self._tail: dict[str, Any] = {}
        self._attempt = 0
        self._process: dict[str, Any] = {}
        self._attempts: Any = None
        self._replicated: dict[str, str] = {}
        """The newest position that was, for the status; empty without a near place."""
        self._ending = threading.Lock()
        self._over = False
        """Whether it is noted how this start ended."""
        self._writing = threading.Lock()
        """Held while the status is replaced, so that none that is under way hides how this start ended."""

    @property
    def writes(self) -> bool:
        """Whether this process writes the run directory, now that the log is ours."""
        return self.run is not None and self.peers.rank == 0 and self._generation is not None

    @property
    def attempt(self) -> int:
        """Which start of the run this is, from 0; known when the log is ours."""
        return self._attempt

    @property
    def where(self) -> Path | str | None:
        """What users call the run; None without a directory."""
        return None if self.run is None else self.run.where

    # Beginning

    def create(
        self, job: Job, best: tuple[str, str] | None, session: SessionBase, known: str | None = None
    ) -> None:
        """Write the run's identity once; every process learns its id.

        `known` is the id that its epochs tell, for an identity that was lost or damaged.
        """
        run = self.run
        if run is None:
            return
        name = job.name or run.name
        if self.peers.rank == 0 and (strangers := run.strangers()):
            some = ", ".join(strangers[:4]) + (", ..." if strangers[4:] else "")
            self.warn(
                f"the run directory {run.where} held other things already ({some}); the run lies beside them"
            )
        self.run_id = decide(
            self.peers,
            "run identity",
            lambda: run.create(name, best, len(session.nodes), known, self.warn)["uuid"],
        )

    def opened(self, holding: LeaseInfo | None, look: Look, choice: Choice) -> None:
        """The log is ours: from now on this process may replace the status."""
        self._generation = holding.generation if holding else None
        self._branch, self._epoch = look.branch, look.epoch
        if not self.writes or self.run is None:
            return
        write_run(self.run.path)
        self._process = process_here()
        before = self._status_before(self.run)
        attempt = before.get("attempt")
        self._attempt = attempt + 1 if type(attempt) is int else 0
        self._tail = _tail_of(before)
        self._attempts = before.get("attempts")
        self._status("RUNNING", epoch=look.epoch)
        notes.append(self.cut_off)
        asked = choice.start == "explicit"
        epoch, step = (choice.epoch, 0) if asked else (look.epoch, look.step)
        rewind = {"rewind": True} if choice.rewind else {}
        self._event(
            "start", attempt=self._attempt, world_size=self.peers.size, epoch=epoch, step=step, **rewind
        )

    def _status_before(self, run: RunDirectory) -> dict[str, Any]:
        """What an earlier attempt noted. A file that cannot be read proves nothing and stops nobody."""
        try:
            return run.status()
        except StorageError as error:
            self.warn(f"{error}. It is written anew; upload, download and exit may run again")
            return {}

    def say_choice(self, choice: Choice, look: Look) -> None:
        """Tell where the run starts; a rewind loudly, because it abandons epochs."""
        if choice.start == "explicit":
            self.say(
                f"rewinding to epoch {choice.epoch} ({choice.reason}); what came after it is kept, abandoned"
            )
        elif choice.start == "newest":
            self.say(f"resuming from epoch {look.position}: {choice.reason}")
        elif choice.rewind:
            self.warn(f"starting from scratch: {choice.reason}; the epochs there are kept, abandoned")

    def say_fallback(self, choice: Choice, look: Look, loaded: Position) -> None:
        """Tell where the run starts after all, where what was announced is damaged."""
        if choice.start == "newest" and loaded != look.position:
            self.say(f"resuming from epoch {loaded} instead")

    # While it runs

    def epoch_done(
        self, state: RunState, metrics: Mapping[str, float], saved: bool | None, verdict: StopVerdict
    ) -> None:
        """Note an epoch's metrics and whether it was saved (None: that goes on behind the training)."""
        if not self.writes:
            return
        line: dict[str, Any] = {
            "epoch": state.epoch,
            "step": state.total_steps,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "saved": saved,
            "metrics": {name: finite(value) for name, value in metrics.items()},
        }
        self._epoch = state.epoch
        note = partial(self._note_epoch, line, state.ended_early, verdict.reasons)
        if saved is None:  # the save in flight does it: a sync waits for the disk
            self.aside(note)
        else:
            note()

    def _note_epoch(self, line: dict[str, Any], ended_early: str | None, stop: Sequence[str]) -> None:
        self._lines("log_metrics", line)
        if ended_early:
            self._event("short epoch", epoch=line["epoch"], reason=ended_early)
        # after a power cut the log, not this status, says which epochs were saved
        self._status("RUNNING", durable=False, epoch=line["epoch"], stop=list(stop))

    def step_points(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Note points within an epoch, in the order of steps."""
        lines = [
            {"epoch": epoch, "step": step, "metrics": {name: finite(one) for name, one in values.items()}}
            for epoch, step, values in rows
        ]
        self._lines("log_steps", lines)

    def steps_go_on(self, step: int) -> None:
        """Points of later steps, where there are any, are of starts that this one replaces."""
        if self.writes and self.run is not None and self.run.generations("steps"):
            self._lines("log_steps", [{"after": step}])

    def save_failed(self, position: Position, error: Exception, in_a_row: int) -> None:
        """Warn loudly: the epoch does not look saved anywhere."""
        self.progress.saved(position, None)
        self._event("save failed", epoch=position.epoch, error=str(error), in_a_row=in_a_row)
        self.warn(f"epoch {position} was NOT saved ({in_a_row} failed in a row): {error}")

    def replicated(self, positions: Sequence[Position]) -> None:
        """Note what came from the near place to the checkpoints' own (`checkpoint.tier`)."""
        for position in positions:
            self._event("replicated", epoch=position.epoch, step=position.step)
            self._replicated = {"replicated": str(position)}

    def warn(self, text: str) -> None:
        """A Python warning on rank 0, so that programs and tests can see it."""
        if self.peers.rank == 0:
            self._event("warning", text=text)
            warn(text, SaveWarning, stacklevel=3)

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        self.progress.line(text)

    def tell(self, kind: str, text: str) -> None:
        """Note an event and say it."""
        self._event(kind, text=text)
        self.say(text)

    # Ending

    def has_ended(self, branch: int, epoch: int) -> bool:
        """Whether this end of the run is noted, and every part after the loop as done before it."""
        run = self.run

        def look() -> bool:
            status = self._status_before(run) if run is not None else {}
            return status.get("state") in ENDED and not _left_of(_tail_of(status), branch, epoch)

        return bool(decide(self.peers, "end of the run", look))

    def tail_left(self, branch: int, epoch: int) -> tuple[str, ...]:
        """The parts after the loop that are not recorded as done, told by rank 0 to all."""
        return tuple(decide(self.peers, "tail", lambda: _left_of(self._tail, branch, epoch)))

    def tail_part_done(self, branch: int, epoch: int, part: str) -> None:
        """Record a part as done, so that a crash after it does not run it again."""
        if not self.writes:
            return
        if (self._tail.get("branch"), self._tail.get("epoch")) != (branch, epoch):
            self._tail = {"branch": branch, "epoch": epoch, "done": []}
        self._tail["done"] = [*self._tail["done"], part]
        self._status("RUNNING", epoch=epoch)

    def attempts_before(self, here: list[Any]) -> tuple[int, int]:
        """Which start of the run this is, from 0, and how many before it began at this very place in a row.

        Notes that this one does, too. Rank 0 only. `here` tells the place; it is empty where each start
        is to count for itself.
        """
        known = self._attempts if isinstance(self._attempts, list) else []
        same = [one for one in known if here and one == here]
        self._attempts = [*(same if len(same) == len(known) else []), here]
        self._status("RUNNING", epoch=self._epoch)
        return self._attempt, len(self._attempts) - 1

    def tail_at(self, branch: int, epoch: int | None) -> int:
        """How many parts after the loop are recorded as done. Rank 0 only."""
        return len(TAIL_PARTS) - len(_left_of(self._tail, branch, epoch))

    def uncount(self) -> None:
        """Count this start as no attempt: a person ended it, or is told what to mend."""
        if isinstance(self._attempts, list):
            self._attempts = self._attempts[:-1]

    def preempted(self, result: RunResult, saved: Position | None, lost: str | None) -> None:
        """Note and say that the run has left for now; `lost` is why the running epoch is not in `saved`."""
        reason = ", ".join(result.stop)
        step = saved.step if saved is not None else 0
        with self._last_note() as first:
            if not first:
                return
            if signal.SIGINT.name in result.stop:
                self.uncount()
            self._event("preempted", reason=reason, epoch=int(result), step=step, lost=lost)
            self._status(
                result.status,
                epoch=int(result),
                step=step,
                stop=list(result.stop),
                exit_code=PreemptedError.exit_code,
                committed=result.committed,
            )
        where = f"from epoch {saved}" if saved is not None else "from its start"
        beyond = f"; of the running epoch nothing could be saved: {lost}" if lost is not None else ""
        self.say(f"preempted ({reason}): the same command goes on {where}{beyond}")

    def finished(self, result: RunResult) -> None:
        """Note how the run ended."""
        with self._last_note() as first:
            if not first:
                return
            self._event("end", state=result.status, epoch=int(result))
            self._status(
                result.status,
                epoch=int(result),
                stop=list(result.stop),
                exit_code=0,
                committed=result.committed,
                metrics={name: finite(value) for name, value in result.metrics.items()},
            )
        if result.status == "STOPPED":
            reason = ", ".join(result.stop)
            self.say(
                f"stopped at epoch {int(result)} ({reason}): where that is gone the same command goes on"
            )

    def failed(self, error: BaseException, state: RunState, reason: str, code: int) -> None:
        """Note a failure, why, and the exit code; never raises: the failure itself is on its way."""
        with self._last_note() as first:
            if not first or isinstance(error, DirectoryInUseError):
                return  # or it is somebody else's status
            if isinstance(error, (KeyboardInterrupt, UsageError)):
                self.uncount()
            try:
                epoch = state.epoch or self._epoch  # before the loop the run is where the log says
                self._note_failure(reason, epoch, code)
                if isinstance(error, KeyboardInterrupt):
                    resumes = "; the same command resumes from the newest saved epoch" if self.run else ""
                    self.say(f"interrupted in epoch {epoch or 0}{resumes}")
            except Exception as second:
                print(f"torchrelay: the failure could not be noted: {second}", file=sys.stderr)

    def cut_off(self, reason: str, code: int) -> None:
        """Note a failure for which this process is ended where it stands; called from a thread."""
        with self._ending:
            first, self._over = not self._over, True
            if first:
                self._note_failure(reason, self._epoch, code)

    def _note_failure(self, reason: str, epoch: int | None, code: int) -> None:
        self._event("failure", error=reason, epoch=epoch)
        # of one that was frozen meanwhile a later start may have written the status
        newest = None
        if self.writes and self.run is not None:
            with suppress(StorageError):
                newest = self.run.status().get("generation")
        if type(newest) is not int or newest <= (self._generation or 0):
            self._status("FAILED", epoch=epoch, error=reason, exit_code=code)

    @contextmanager
    def _last_note(self) -> Iterator[bool]:
        """A thread that is to end the process waits for the block, for seconds at most.

        False where it is noted already how this start ended.
        """
        self.progress.close()
        with self._ending:
            yield not self._over
            self._over = True  # not where the block was interrupted: then the interruption is noted
        notes.forget(self.cut_off)

    def _event(self, kind: str, **details: Any) -> None:
        self._lines("log_event", kind, **details)

    def _lines(self, verb: str, *values: Any, **details: Any) -> None:
        """Add lines to a file of this start, where this process writes the run directory."""
        if self.writes:
            self._note(getattr(self.run, verb), self._generation, *values, **details)

    def _status(self, state: State, **details: Any) -> None:
        if not self.writes or self.run is None:
            return
        with self._writing:
            if state == "RUNNING" and self._over:
                return
            self._note(
                self.run.write_status,
                state,
                attempt=self._attempt,
                generation=self._generation,
                **self._process,
                tail=self._tail,
                attempts=self._attempts,
                **self._replicated,
                **details,
            )

    @staticmethod
    def _note(write: Callable[..., None], *values: Any, **details: Any) -> None:
        """What is noted is for people: where it cannot be written, training goes on."""
        try:
            write(*values, **details)
        except StorageError as error:
            warn(f"the run directory could not be written: {error}", SaveWarning, stacklevel=4)


def _tail_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Which parts after the loop a status says are done; empty where it does not say that."""
    tail = status.get("tail")
    if isinstance(tail, dict) and isinstance(tail.get("done"), list):
        return tail
    return {}


def _left_of(tail: Mapping[str, Any], branch: int, epoch: int | None) -> list[str]:
    same = (tail.get("branch"), tail.get("epoch")) == (branch, epoch)
    return [part for part in TAIL_PARTS if not same or part not in tail["done"]]
