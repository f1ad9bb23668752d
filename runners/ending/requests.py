"""Requests to end early or to save, as one process knows them: signals, a time limit, the file STOP.

Raising a request is all that a signal handler does. When it counts is agreed by all processes, in
`ctx.steps` and between the phases of a run (`runners.ending.boundaries`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torchrelay.runners.ending.time_limits import Deadline

NOT_ASKED, TIME_IS_UP, ASKED, PREEMPT = range(4)
"""How urgently a process wants to end: not; for the run's `max_time`; for good; now, to go on later."""

GRACE_SECS = 30.0
"""What a launcher waits between SIGTERM and SIGKILL: torchrun's default, and Slurm's KillWait."""
_PERSON_SECS = 600.0
"""What a person who pressed Ctrl-C waits; whoever does not presses it again."""
RESERVE_SECS = 10.0
"""What is left of the grace when work that cannot be continued in its middle is given up."""
_LOOK_SECS = 1.0
_MARGIN_SECS = 1.0


class Requests:
    """Mutable; one per run and process. `save_secs` tells how long a save takes, which needs to fit in.

    `deadlines` end this start of the run in time for one more save; `stop_file` is looked for once a second
    (None: by another process), and called `stop_name` where that is another. `notice_secs` is how long before
    the end SIGUSR1 comes.
    """

    def __init__(
        self,
        deadlines: tuple[Deadline, ...] = (),
        stop_file: Path | None = None,
        save_secs: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        notice_secs: float = GRACE_SECS,
        stop_name: str | None = None,
    ) -> None:
        self.deadlines = deadlines
        self._save_secs = save_secs
        self._stop_file, self._stop_name = stop_file, stop_name or str(stop_file)
        self._clock = clock
        self._notice_secs = notice_secs
        self._signal: str | None = None
        self._save: str | None = None
        self._kill_at: float | None = None
        self._looked = -_LOOK_SECS
        self._stop = False
        self.steps = False
        """Whether epochs run in steps that end where that is asked for, so that the next one is near."""

    def preempt(self, name: str) -> None:
        """A signal of this name came: leave, within the grace from now on. Signal handlers call this."""
        grace = {"SIGUSR1": self._notice_secs, "SIGINT": _PERSON_SECS}.get(name, GRACE_SECS)
        kill_at = self._clock() + grace
        if self._signal is None:
            self._signal, self._kill_at = name, kill_at
        elif name != "SIGUSR1" and self._kill_at is not None:
            self._kill_at = min(self._kill_at, kill_at)  # notice was given, now the end has come

    def save(self, name: str) -> None:
        """A signal of this name came: save at the next safe point. Signal handlers call this."""
        self._save = name

    @property
    def save_wanted(self) -> bool:
        """Whether this process was asked for a save that has not begun."""
        return self._save is not None

    def take_save(self) -> str | None:
        """Who asked for the save that begins now, which serves all who asked until now."""
        name, self._save = self._save, None
        return name

    @property
    def need_secs(self) -> float:
        """What a save is given: twice what it takes."""
        return 2 * self._save_secs()

    def level(self, *, patient: bool = False) -> int:
        """NOT_ASKED, ASKED or PREEMPT, now. `patient`: a preemption waits while there is time for that."""
        if self._preempted(patient=patient):
            return PREEMPT
        return ASKED if self._stop_wanted() else NOT_ASKED

    def reason(self) -> str | None:
        """Who asks, in words; None where this process knows of nobody."""
        late = self._late()
        if self._signal is not None or late is not None:
            return self._signal or (late.name if late else None)
        return f"the file {self._stop_name}" if self._stop else None

    def secs_left(self) -> float | None:
        """Seconds until this process has to be gone; None where nobody said so."""
        ends = [deadline.at for deadline in self.deadlines]
        ends += [] if self._kill_at is None else [self._kill_at]
        return min(ends) - self._clock() if ends else None

    def _preempted(self, *, patient: bool) -> bool:
        if self._signal is None and self._late() is None:
            return False
        left = self.secs_left()
        return not patient or left is None or left < self.need_secs + RESERVE_SECS

    def _late(self) -> Deadline | None:
        now = self._clock() + self.need_secs + _MARGIN_SECS
        return next((one for one in self.deadlines if now >= one.at - one.margin_secs), None)

    def _stop_wanted(self) -> bool:
        now = self._clock()
        if self._stop_file is not None and not self._stop and now - self._looked >= _LOOK_SECS:
            self._looked, self._stop = now, _exists(self._stop_file)
        return self._stop


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory that cannot be looked into asks for nothing
        return False
