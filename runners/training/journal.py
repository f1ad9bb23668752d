"""Record a run: status, events, metrics, and console lines.

Rank 0 writes; other ranks only get what they need for their decisions. Without a run directory only console
lines remain.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.lease import process_here
from torchrelay.checkpoint.log.view import LeaseInfo, Look
from torchrelay.errors import DirectoryInUseError, NoProgressError, PreemptedError, StorageError, UsageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers, decide, warn
from torchrelay.metadata.fs import finite
from torchrelay.metadata.run_directory import RunDirectory, State
from torchrelay.runners.distributed.launcher import notes, write_run
from torchrelay.runners.monitoring.progress import Progress
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict, early_reasons
from torchrelay.runners.training.plan import Choice, RunResult

_NAMED = 8
FINAL_PARTS = ("upload", "download", "exit")
ENDED: tuple[State, ...] = ("FINISHED", "STOPPED")
"""The states of a run whose end is recorded."""


class SaveWarning(UserWarning):
    """An epoch was not saved; the training continues."""


class Journal:
    """The records of one run. `aside` runs work in the background (`Background.aside`)."""

    def __init__(
        self,
        run: RunDirectory | None,
        peers: Peers,
        progress: Progress,
        aside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.run, self.peers, self.progress = run, peers, progress
        self.run_id: str | None = None
        self.aside = aside or (lambda work: work())
        self.attempt = 0  # number of this attempt; known after the log is held
        self._generation: int | None = None
        self._branch = 0
        self._epoch: int | None = None
        self._final: dict[str, Any] = {}
        self._process: dict[str, Any] = {}
        self._attempts: Any = None
        self._replicated: dict[str, str] = {}
        """The newest replicated position for the status; empty without a local tier."""
        self._ending = threading.Lock()
        self._over = False  # true if the end of this attempt is recorded
        self._writing = threading.Lock()
        """Held while the status is replaced, so that no pending write hides the recorded end."""

    @property
    def writes(self) -> bool:
        """True if this process writes the run directory, after the log is held."""
        return self.run is not None and self.peers.rank == 0 and self._generation is not None

    @property
    def where(self) -> Path | str | None:
        """Path or URL of the run; None without a directory."""
        return None if self.run is None else self.run.where

    # Beginning

    def create(
        self, job: Job, best: tuple[str, str] | None, session: SessionBase, known: str | None = None
    ) -> None:
        """Write the run's identity once and return its id on all; `known` is the id in its epochs."""
        run = self.run
        if run is None:
            return
        name = job.name or run.name
        if self.peers.rank == 0 and (strangers := run.strangers()):
            some = ", ".join(strangers[:4]) + (", ..." if strangers[4:] else "")
            self.warn(f"the run directory {run.where} already contains other files ({some}), which are kept")
        self.run_id = decide(
            self.peers,
            "run identity",
            lambda: run.create(name, best, len(session.nodes), known, self.warn)["uuid"],
        )

    def opened(self, holding: LeaseInfo | None, look: Look, choice: Choice) -> None:
        """After the log is held: this process may replace the status."""
        self._generation = holding.generation if holding else None
        self._branch, self._epoch = look.branch, look.epoch
        if not self.writes or self.run is None:
            return
        write_run(self.run.path)
        self._process = process_here()
        before = self._status_before(self.run)
        attempt = before.get("attempt")
        self.attempt = attempt + 1 if type(attempt) is int else 0
        self._final = _final_of(before)
        self._attempts = before.get("attempts")
        self._status("RUNNING", epoch=look.epoch)
        notes.append(self.cut_off)
        asked = choice.start == "explicit"
        epoch, step = (choice.epoch, 0) if asked else (look.epoch, look.step)
        rewind = {"rewind": True} if choice.rewind else {}
        size = self.peers.size
        self._event("start", attempt=self.attempt, world_size=size, epoch=epoch, step=step, **rewind)

    def _status_before(self, run: RunDirectory) -> dict[str, Any]:
        """Return the status of an earlier attempt; an unreadable file is ignored with a warning."""
        try:
            return run.status()
        except StorageError as error:
            self.warn(f"{error}. It is written again; upload, download and exit may run again")
            return {}

    def say_choice(self, choice: Choice, look: Look) -> None:
        """Log the start position; warn about a rewind, because it abandons epochs."""
        if choice.start == "explicit":
            self.say(f"rewinding to epoch {choice.epoch} ({choice.reason}); later epochs are kept, abandoned")
        elif choice.start == "newest":
            self.say(f"resuming from epoch {look.position}: {choice.reason}")
        elif choice.rewind:
            self.warn(f"starting from scratch: {choice.reason}; existing epochs are kept, abandoned")

    def say_new_run(self, saved: Collection[str]) -> None:
        """Log what a new run saves and where; warn if that is only random states."""
        if not saved:
            self.warn("nothing is registered, so checkpoints hold random states only: pass blobs to Job")
            return
        names, size = sorted(saved), self.peers.size
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")
        where = self.where
        if isinstance(where, Path):
            with suppress(OSError, ValueError):  # elsewhere, or without a working directory
                where = where.relative_to(Path.cwd())
        self.say(f"new run{f' {where}' if where else ''} on {size} rank{'s' * (size > 1)} saves {shown}")

    # While it runs

    def epoch_done(
        self, state: RunState, metrics: Mapping[str, float], saved: bool | None, verdict: StopVerdict
    ) -> None:
        """Record an epoch's metrics and if it was saved (None: the save is in flight)."""
        if not self.writes:
            return
        line: dict[str, Any] = {
            "epoch": state.epoch,
            "step": state.total_steps,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "saved": saved,
            "metrics": {name: finite(value) for name, value in metrics.items()},
        }
        self._epoch = state.epoch
        note = partial(self._note_epoch, line, state.ended_early, verdict.reasons)
        if saved is None:  # the save in flight records it: a sync waits for the disk
            self.aside(note)
        else:
            note()

    def _note_epoch(self, line: dict[str, Any], ended_early: str | None, stop: Sequence[str]) -> None:
        self._lines("log_metrics", line)
        if ended_early:
            self._event("short epoch", epoch=line["epoch"], reason=ended_early)
        # after a power cut the log is authoritative, not this status
        self._status("RUNNING", durable=False, epoch=line["epoch"], stop=list(stop))

    def step_points(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Record points within an epoch, in the order of steps."""
        lines = [
            {"epoch": epoch, "step": step, "metrics": {name: finite(one) for name, one in values.items()}}
            for epoch, step, values in rows
        ]
        self._lines("log_steps", lines)

    def replace_steps_after(self, step: int) -> None:
        """Record that points of later steps come from abandoned attempts."""
        if self.writes and self.run is not None and self.run.generations("steps"):
            self._lines("log_steps", [{"after": step}])

    def save_failed(self, position: Position, error: Exception, in_a_row: int) -> None:
        """Warn that an epoch is not saved."""
        self.progress.saved(position, None)
        self._event("save failed", epoch=position.epoch, error=str(error), in_a_row=in_a_row)
        self.warn(f"epoch {position} was NOT saved ({in_a_row} failed in a row): {error}")

    def replicated(self, positions: Sequence[Position]) -> None:
        """Record positions that were uploaded from the local tier (`checkpoint.tiering`)."""
        for position in positions:
            self._event("replicated", epoch=position.epoch, step=position.step)
            self._replicated = {"replicated": str(position)}

    def warn(self, text: str) -> None:
        """Issue a Python warning on rank 0, visible to programs and tests."""
        if self.peers.rank == 0:
            self._event("warning", text=text)
            warn(text, SaveWarning, stacklevel=3)

    def say(self, text: str) -> None:
        """Print one console line."""
        self.progress.line(text)

    def tell(self, kind: str, text: str) -> None:
        """Record an event and print it."""
        self._event(kind, text=text)
        self.say(text)

    # Ending

    def has_ended(self, branch: int, epoch: int) -> bool:
        """Return True if the end of the run and all final parts are recorded."""
        run = self.run

        def look() -> bool:
            status = self._status_before(run) if run is not None else {}
            return status.get("state") in ENDED and not _left_of(_final_of(status), branch, epoch)

        return bool(decide(self.peers, "end of the run", look))

    def final_parts_left(self, branch: int, epoch: int) -> tuple[str, ...]:
        """Return the final parts that are not recorded as done, agreed from rank 0."""
        return tuple(decide(self.peers, "tail", lambda: _left_of(self._final, branch, epoch)))

    def final_part_done(self, branch: int, epoch: int, part: str) -> None:
        """Record a final part as done, so that a crash after it does not repeat it."""
        if not self.writes:
            return
        if (self._final.get("branch"), self._final.get("epoch")) != (branch, epoch):
            self._final = {"branch": branch, "epoch": epoch, "done": []}
        self._final["done"] = [*self._final["done"], part]
        self._status("RUNNING", epoch=epoch)

    def check_attempts(self, choice: Choice, branch: int, start: Position | None, most: int) -> int:
        """Record where this attempt starts, and return its number; all processes together.

        Raises NoProgressError if `most` earlier attempts in a row started there too. A rewind begins a branch
        and always counts as progress; attempts ended by Ctrl-C or a usage error do not count.
        """

        def count() -> tuple[int, int]:
            epoch, step = (start.epoch, start.step) if start is not None else (None, 0)
            done = 0 if epoch is None else len(FINAL_PARTS) - len(_left_of(self._final, branch, epoch))
            here = [] if choice.rewind else [branch, epoch, step, done]
            known = self._attempts if isinstance(self._attempts, list) else []
            same = [one for one in known if here and one == here]
            self._attempts = [*(same if len(same) == len(known) else []), here]
            self._status("RUNNING", epoch=self._epoch)
            return self.attempt, len(self._attempts) - 1

        attempt, before = decide(self.peers, "attempts", count)
        if most and before >= most:
            self.uncount()
            where = "the beginning" if start is None or choice.rewind else f"epoch {start}"
            raise NoProgressError(
                f"{before} launches in a row started at {where} in {self.where} and made no progress: see "
                f"`torchrelay show` for their errors, fix the cause, and launch with "
                f"--max-attempts {before + most} (or max_attempts=; 0 for no limit)"
            )
        return int(attempt)

    def uncount(self) -> None:
        """Do not count this attempt: a user stopped it, or must correct a mistake."""
        if isinstance(self._attempts, list):
            self._attempts = self._attempts[:-1]

    def preempted(self, result: RunResult, saved: Position | None, lost: str | None) -> None:
        """Record a preemption; `lost` is the reason why the running epoch is not in `saved`."""
        reason = ", ".join(result.stop)
        step = saved.step if saved is not None else 0
        with self._last_note() as first:
            if not first:
                return
            if signal.SIGINT.name in result.stop:
                self.uncount()
            self._event("preempted", reason=reason, epoch=int(result), step=step, lost=lost)
            self._note_result(result, step=step, exit_code=PreemptedError.exit_code)
        where = f"from epoch {saved}" if saved is not None else "from its start"
        beyond = f"; the running epoch could not be saved: {lost}" if lost is not None else ""
        self.say(f"preempted ({reason}): the same command resumes {where}{beyond}")

    def finished(self, result: RunResult, job: Job, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the end of the run, and log why if it ended before its limits."""
        with self._last_note() as first:
            if not first:
                return
            self._event("end", state=result.status, epoch=int(result))
            metrics = {name: finite(value) for name, value in result.metrics.items()}
            self._note_result(result, exit_code=0, metrics=metrics)
        early, reason = early_reasons(job, answers), ", ".join(result.stop)
        if early and result.status == "FINISHED":
            self.say(f"finished at epoch {int(result)}: {early}")
        if result.status == "STOPPED":
            text = "remove the cause, and the same command resumes"
            self.say(f"stopped at epoch {int(result)} ({reason}): {text}")

    def _note_result(self, result: RunResult, **more: Any) -> None:
        stop, committed = list(result.stop), result.committed
        self._status(result.status, epoch=int(result), stop=stop, committed=committed, **more)

    def failed(self, error: BaseException, state: RunState, reason: str, code: int) -> None:
        """Record a failure with its reason and exit code; never raises, as the failure is on its way."""
        with self._last_note() as first:
            if not first or isinstance(error, DirectoryInUseError):
                return  # or it is the status of another process
            if isinstance(error, (KeyboardInterrupt, UsageError)):
                self.uncount()
            try:
                epoch = state.epoch or self._epoch  # before the loop the position is that of the log
                self._note_failure(reason, epoch, code)
                if isinstance(error, KeyboardInterrupt):
                    resumes = "; the same command resumes from the newest saved epoch" if self.run else ""
                    self.say(f"interrupted in epoch {epoch or 0}{resumes}")
            except Exception as second:
                print(f"torchrelay: the failure could not be recorded: {second}", file=sys.stderr)

    def cut_off(self, reason: str, code: int) -> None:
        """Record a failure for which a thread ends this process."""
        with self._ending:
            first, self._over = not self._over, True
            if first:
                self._note_failure(reason, self._epoch, code)

    def _note_failure(self, reason: str, epoch: int | None, code: int) -> None:
        """Write the failure unless a newer attempt has written the status."""
        self._event("failure", error=reason, epoch=epoch)
        # if this process was frozen, a later attempt may have written the status
        newest = None
        if self.writes and self.run is not None:
            with suppress(StorageError):
                newest = self.run.status().get("generation")
        if type(newest) is not int or newest <= (self._generation or 0):
            self._status("FAILED", epoch=epoch, error=reason, exit_code=code)

    @contextmanager
    def _last_note(self) -> Iterator[bool]:
        """Let a thread that ends the process wait for the block; yields False if an end is recorded."""
        self.progress.close()
        with self._ending:
            yield not self._over
            self._over = True  # not if the block was interrupted: then the interruption is recorded
        notes.forget(self.cut_off)

    def _event(self, kind: str, **details: Any) -> None:
        self._lines("log_event", kind, **details)

    def _lines(self, verb: str, *values: Any, **details: Any) -> None:
        """Append lines to a file of this attempt, if this process writes the run directory."""
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
                attempt=self.attempt,
                generation=self._generation,
                **self._process,
                tail=self._final,
                attempts=self._attempts,
                **self._replicated,
                **details,
            )

    @staticmethod
    def _note(write: Callable[..., None], *values: Any, **details: Any) -> None:
        """Write a record; a failure is only a warning, so that the training continues."""
        try:
            write(*values, **details)
        except StorageError as error:
            warn(f"the run directory could not be written: {error}", SaveWarning, stacklevel=4)


def _final_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded final parts of a status; empty if there are none."""
    tail = status.get("tail")
    if isinstance(tail, dict) and isinstance(tail.get("done"), list):
        return tail
    return {}


def _left_of(tail: Mapping[str, Any], branch: int, epoch: int | None) -> list[str]:
    same = (tail.get("branch"), tail.get("epoch")) == (branch, epoch)
    return [part for part in FINAL_PARTS if not same or part not in tail["done"]]
