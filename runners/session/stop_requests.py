"""Requests to end early or to save: by signals, time limits or the file STOP. Needs no torch.

Raising a request is all that a signal handler does. When it counts is agreed by all processes, in
`ctx.steps` and between the phases of a run (`runners.training.preemption`).

A handler of Python does not run inside a collective; there the other ranks, which come to the next step,
bring the process out of it. Ctrl-C is such a request where a step is near; elsewhere, and when it comes
again, it interrupts as ever.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import seconds_in
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher_status import write_stderr

SLURM_MARGIN_SECS = 30.0
"""Slurm's clock is coarse, and it sends SIGTERM at the end: better to be gone before."""

END_TIME = "TORCHRELAY_END_TIME"
"""When `torchrelay launch` ends the job, in seconds since 1970."""
_LAUNCH_MARGIN_SECS = 5.0
_NOTICE = "TORCHRELAY_NOTICE_SECS"

TimeLimit = str | float | timedelta


@dataclass(frozen=True)
class StopDeadline:
    """A moment of the monotonic clock by which the process is gone, and how it is called."""

    at: float
    name: str
    margin_secs: float = 0.0


def seconds_of(limit: TimeLimit) -> float:
    """Seconds of `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"`, a timedelta; UsageError otherwise."""
    secs = seconds_in(limit)
    if secs is None or not math.isfinite(secs) or secs <= 0:
        raise UsageError(
            f"time_limit is {limit!r:.80}; give seconds above 0, a text such as '1h30m' or '01:30:00', "
            "or a timedelta"
        )
    return secs


def seconds_typed(text: str) -> float:
    """The same as the type of an option."""
    try:
        return seconds_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def deadlines_of(limit_secs: float | None, environ: Mapping[str, str]) -> tuple[StopDeadline, ...]:
    """The deadlines of a start that begins now: of `limit_secs`, and those that its launcher has set."""
    found = []
    if limit_secs is not None:
        found.append(StopDeadline(time.monotonic() + limit_secs, f"the time limit of {limit_secs:g} s"))
    # Slurm before 23 sets no end by itself; `torchrelay launch --slurm` asks for it.
    for key, name, margin in (
        ("SLURM_JOB_END_TIME", "the end of the Slurm job", SLURM_MARGIN_SECS),
        (END_TIME, "the time limit of the launch", _LAUNCH_MARGIN_SECS),
    ):
        end = environ.get(key, "")
        if end.isascii() and end.isdigit() and int(end) > time.time():
            found.append(StopDeadline(time.monotonic() + int(end) - time.time(), name, margin))
    return tuple(found)


def notice_of(environ: Mapping[str, str], default: float) -> float:
    """How many seconds before the end SIGUSR1 comes, as `torchrelay launch` says; never below `default`."""
    text = environ.get(_NOTICE, "")
    return max(default, float(text)) if text.isascii() and text.isdigit() and len(text) <= 9 else default


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
        deadlines: tuple[StopDeadline, ...] = (),
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
        self._stopped_by: str | None = None
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

    def stop(self, name: str) -> None:
        """The program itself, in these words, has no more epochs for this start."""
        self._stop, self._stopped_by = True, name

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
        if self._signal is not None or self._late() is not None:
            left = self.secs_left()
            if not patient or left is None or left < self.need_secs + RESERVE_SECS:
                return PREEMPT
        now = self._clock()
        if self._stop_file is not None and not self._stop and now - self._looked >= _LOOK_SECS:
            self._looked = now
            with suppress(OSError):  # a directory that cannot be looked into asks for nothing
                self._stop = self._stop_file.exists()
        return ASKED if self._stop else NOT_ASKED

    def reason(self) -> str | None:
        """Who asks, in words; None where this process knows of nobody."""
        late = self._late()
        if self._signal is not None or late is not None:
            return self._signal or (late.name if late else None)
        return (self._stopped_by or f"the file {self._stop_name}") if self._stop else None

    def secs_left(self) -> float | None:
        """Seconds until this process has to be gone; None where nobody said so."""
        ends = [deadline.at for deadline in self.deadlines]
        ends += [] if self._kill_at is None else [self._kill_at]
        return min(ends) - self._clock() if ends else None

    def _late(self) -> StopDeadline | None:
        now = self._clock() + self.need_secs + _MARGIN_SECS
        return next((one for one in self.deadlines if now >= one.at - one.margin_secs), None)


SAME_REQUEST_SECS = 5.0
"""A second SIGTERM within this time is the first one again: Slurm sends it to launcher and ranks, and the
launcher passes it on. A later one ends the process at once."""

SAME_INTERRUPT_SECS = 1.0
"""The same of Ctrl-C, which launchers pass on, too; people press it again later."""
_ends_soon = threading.Event()
_NO_SAVE = ("SIGTERM", "SIGUSR1", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
"""Those that mean to leave, and those that mean something else to the system."""


def save_signal_of(name: Any) -> signal.Signals | None:
    """The signal that asks for a save, None for none; raises UsageError for one that cannot."""
    if name is None:
        return None
    if isinstance(name, str) and name in signal.Signals.__members__ and name not in _NO_SAVE:
        return signal.Signals[name]
    raise UsageError(
        f"save_signal is {name!r:.80}; give the name of a signal such as 'SIGUSR2' (SIGTERM and SIGUSR1 "
        "ask to leave), or None"
    )


@contextmanager
def signals_ask(requests: Requests, save: signal.Signals | None = None) -> Iterator[None]:
    """While the block runs SIGTERM, SIGUSR1 and Ctrl-C ask to leave, `save` for a save.

    After it all is as before.

    `save` is left alone where it has a handler of the program's own, and ignored from then on where nothing
    follows.
    Only in the main thread, where Python has its handlers. A signal that somebody handles outside of Python
    is left alone, and so is one that is ignored, but for `save`: an ignored signal may be inherited from a
    process whose own training has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _SignalHandler(requests)
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, handler.interrupted)
        if save is not None and not _handled(save):
            before[save] = signal.signal(save, lambda *_: requests.save(save.name))
        yield
    finally:
        for number, old in before.items():
            late = number == save and old is signal.SIG_DFL and _ends_soon.is_set()
            signal.signal(number, signal.SIG_IGN if late else old)


@contextmanager
def nothing_follows() -> Iterator[None]:
    """While the block runs the process is to end when its training has: a late request to save is ignored.

    As before the training it would kill the process, and a run that is finished would look like a failed one.
    """
    _ends_soon.set()
    try:
        yield
    finally:
        _ends_soon.clear()


def _handled(number: signal.Signals) -> bool:
    """Whether the program handles a signal, in Python or (as faulthandler does) outside of it."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
        return True
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return number != signal.SIGINT and bool(int(caught, 16) >> (number - 1) & 1)


def ignore_termination() -> None:
    """For the last moments of a process that leaves as asked: launchers end the others when one has left."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _SignalHandler:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._terminated: float | None = None
        self._interrupted: float | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._terminated is not None and now - self._terminated > SAME_REQUEST_SECS:
                os._exit(128 + number)
            self._terminated = self._terminated or now
        self._requests.preempt(signal.Signals(number).name)

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: leave at the next step. Raises KeyboardInterrupt where none is near, or the second time."""
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted < SAME_INTERRUPT_SECS:
            return
        if self._interrupted is not None or not self._requests.steps:
            signal.default_int_handler(number, frame)
        self._interrupted = now
        if os.environ.get("RANK", "0") == "0":
            write_stderr("torchrelay: Ctrl-C: saving at the next step, to leave; once more leaves at once\n")
        self._requests.preempt(signal.Signals(number).name)


def requests_of(
    limit_secs: float | None, run: RunDirectory | None, save_secs: Callable[[], float], *, looks: bool
) -> Requests:
    """What may end the run early; the file STOP is looked for by the process that `looks`."""
    return Requests(
        deadlines_of(limit_secs, os.environ),
        run.stop_file if run is not None and looks else None,
        save_secs,
        notice_secs=notice_of(os.environ, GRACE_SECS),
        stop_name=None if run is None else f"{run.where}/STOP",
    )


class Interrupted(BaseException):
    """Ends the running tasks at a step or boundary that all processes agreed on; never leaves `train`.

    Passes by `except Exception` of users, as CancelledError does; their `finally` blocks run.
    """
