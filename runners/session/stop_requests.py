"""Requests to stop or to save: signals, time limits and the file STOP. Does not import torch.

A signal handler only records a request. All processes agree when it takes effect, in `ctx.steps` and between
the phases of a run (`runners.training.saver`).

Python's handlers do not run inside a collective; there the other ranks, which reach the next step, release
the process. Ctrl-C is such a request if a step is near; otherwise, and the second time, it interrupts as
usual.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import seconds_in
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher import write_stderr

SLURM_MARGIN_SECS = 30.0
"""Safety margin: Slurm's clock is coarse, and it sends SIGTERM only at the end."""

END_TIME = "TORCHRELAY_END_TIME"
"""Time at which `torchrelay launch` ends the job, in seconds since 1970."""
_LAUNCH_MARGIN_SECS = 5.0
_NOTICE = "TORCHRELAY_NOTICE_SECS"

TimeLimit = str | float | timedelta


@dataclass(frozen=True)
class StopDeadline:
    """A moment of the monotonic clock by which the process must have exited, and its name."""

    at: float
    name: str
    margin_secs: float = 0.0


def seconds_of(limit: TimeLimit) -> float:
    """Parse `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"` or a timedelta; UsageError otherwise."""
    secs = seconds_in(limit)
    if secs is None or not math.isfinite(secs) or secs <= 0:
        raise UsageError(
            f"invalid time_limit={limit!r:.80}: expected seconds above 0, a text such as '1h30m' or "
            "'01:30:00', or a timedelta"
        )
    return secs


def seconds_typed(text: str) -> float:
    """Parse a time as the type of a command-line option."""
    try:
        return seconds_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def deadlines_of(limit_secs: float | None, environ: Mapping[str, str]) -> tuple[StopDeadline, ...]:
    """Return the deadlines of this launch: `limit_secs`, and those set by its launcher."""
    now, found = time.monotonic(), []
    if limit_secs is not None:
        found.append(StopDeadline(now + limit_secs, f"the time limit of {limit_secs:g} s"))
    # Slurm before 23 does not set this variable; `torchrelay launch --slurm` does.
    for key, name, margin in (
        ("SLURM_JOB_END_TIME", "the end of the Slurm job", SLURM_MARGIN_SECS),
        (END_TIME, "the time limit of the launch", _LAUNCH_MARGIN_SECS),
    ):
        end = environ.get(key, "")
        if end.isascii() and end.isdigit() and int(end) > time.time():
            found.append(StopDeadline(now + int(end) - time.time(), name, margin))
    return tuple(found)


def notice_of(environ: Mapping[str, str], default: float) -> float:
    """Return the seconds between SIGUSR1 and the end, as set by the launcher; at least `default`."""
    text = environ.get(_NOTICE, "")
    return max(default, float(text)) if text.isascii() and text.isdigit() and len(text) <= 9 else default


NOT_ASKED, TIME_IS_UP, ASKED, PREEMPT = range(4)
"""Urgency of a stop: none; the run's `max_time`; a final stop; a preemption, to be resumed later."""

GRACE_SECS = 30.0
"""Time between SIGTERM and SIGKILL: default of torchrun, and Slurm's KillWait."""
_PERSON_SECS = 600.0  # grace period after Ctrl-C; pressing it again ends the process at once
RESERVE_SECS = 10.0
"""Rest of the grace period at which work that cannot be resumed in its middle is aborted."""
_LOOK_SECS = 1.0
_MARGIN_SECS = 1.0


class Requests:
    """Requests of one run and process. Mutable. `save_secs` returns the duration of a save.

    `deadlines` end this launch in time for one more save. `stop_file` is checked once a second (None: by
    another process), and named `stop_name` in messages. SIGUSR1 comes `notice_secs` before the end.
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
        self.deadlines, self._save_secs, self._clock = deadlines, save_secs, clock
        self._stop_file, self._stop_name = stop_file, stop_name or str(stop_file)
        self._notice_secs = notice_secs
        self._signal: str | None = None
        self._save: str | None = None
        self._kill_at: float | None = None
        self._looked, self._stop = -_LOOK_SECS, False
        self._stopped_by: str | None = None
        self.steps = False  # true if epochs run in steps that react to requests, so that the next one is near

    def preempt(self, name: str) -> None:
        """Record a signal that asks to stop within the grace period. Called by signal handlers."""
        grace = {"SIGUSR1": self._notice_secs, "SIGINT": _PERSON_SECS}.get(name, GRACE_SECS)
        kill_at = self._clock() + grace
        if self._signal is None:
            self._signal, self._kill_at = name, kill_at
        elif name != "SIGUSR1" and self._kill_at is not None:
            self._kill_at = min(self._kill_at, kill_at)  # the announced end has come

    def stop(self, name: str) -> None:
        """Record that the program itself ends this launch; `name` is the reason."""
        self._stop, self._stopped_by = True, name

    def save(self, name: str) -> None:
        """Record a signal that asks for a save at the next safe point. Called by signal handlers."""
        self._save = name

    @property
    def save_wanted(self) -> bool:
        """True if a save was requested and has not begun."""
        return self._save is not None

    def take_save(self) -> str | None:
        """Return who requested the save that begins now; it serves all requests so far."""
        name, self._save = self._save, None
        return name

    @property
    def need_secs(self) -> float:
        """Time reserved for a save: twice its duration."""
        return 2 * self._save_secs()

    def level(self, *, patient: bool = False) -> int:
        """Return NOT_ASKED, ASKED or PREEMPT. `patient`: a preemption waits while there is time."""
        if self._signal is not None or self._late() is not None:
            left = self.secs_left()
            if not patient or left is None or left < self.need_secs + RESERVE_SECS:
                return PREEMPT
        now = self._clock()
        if self._stop_file is not None and not self._stop and now - self._looked >= _LOOK_SECS:
            self._looked = now
            with suppress(OSError):  # an unreadable directory is no request
                self._stop = self._stop_file.exists()
        return ASKED if self._stop else NOT_ASKED

    def reason(self) -> str | None:
        """Return the source of the request; None if this process has none."""
        if self._signal is not None:
            return self._signal
        if (late := self._late()) is not None:
            return late.name
        return (self._stopped_by or f"the file {self._stop_name}") if self._stop else None

    def secs_left(self) -> float | None:
        """Return the seconds until this process must have exited; None without a deadline."""
        ends = [deadline.at for deadline in self.deadlines]
        ends += [] if self._kill_at is None else [self._kill_at]
        return min(ends) - self._clock() if ends else None

    def _late(self) -> StopDeadline | None:
        """Return the deadline that is near, if any."""
        now = self._clock() + self.need_secs + _MARGIN_SECS
        return next((one for one in self.deadlines if now >= one.at - one.margin_secs), None)


SAME_REQUEST_SECS = 5.0
"""A second SIGTERM within this time counts as the first: Slurm sends it to launcher and ranks, and the
launcher passes it on. A later one ends the process at once."""

SAME_INTERRUPT_SECS = 1.0
"""The same for Ctrl-C, which launchers also pass on."""
_announced: MutableSequence[str] = []
"""The SIGTERM and SIGUSR1 that runs of this process got: they announce its end, and so that of later runs."""
_ends_soon = threading.Event()
_NO_SAVE = ("SIGTERM", "SIGUSR1", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that ask to stop, and those with another meaning for the system."""


def save_signal_of(name: Any) -> signal.Signals | None:
    """Return the signal that asks for a save, None for none; raises UsageError for an invalid one."""
    if name is None:
        return None
    if isinstance(name, str) and name in signal.Signals.__members__ and name not in _NO_SAVE:
        return signal.Signals[name]
    raise UsageError(
        f"invalid save_signal={name!r:.80}: expected the name of a signal such as 'SIGUSR2', or None "
        "(SIGTERM and SIGUSR1 ask to stop)"
    )


@contextmanager
def signals_ask(requests: Requests, save: signal.Signals | None = None) -> Iterator[None]:
    """While the block runs, SIGTERM, SIGUSR1 and Ctrl-C ask to stop, and `save` asks for a save.

    A SIGTERM or SIGUSR1 that an earlier run of this process got asks this one, too.
    Only in the main thread. A handler of the program for `save` is kept; without one the signal is ignored
    afterwards if nothing follows. Signals handled outside of Python, and ignored signals except `save`, are
    left alone: an ignored signal may be inherited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for name in _announced:
        requests.preempt(name)
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
    """Ignore late requests to save in a process that ends then: their default action would kill it."""
    _ends_soon.set()
    try:
        yield
    finally:
        _ends_soon.clear()


def _handled(number: signal.Signals) -> bool:
    """Return True if the program handles a signal, in Python or (as faulthandler) outside of it."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
        return True
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return number != signal.SIGINT and bool(int(caught, 16) >> (number - 1) & 1)


def ignore_termination() -> None:
    """Ignore SIGTERM during the last moments: launchers end the others after the first exit."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _SignalHandler:
    """Handler of SIGTERM, SIGUSR1 and Ctrl-C."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._terminated: float | None = None
        self._interrupted: float | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if number == signal.SIGTERM:
            if self._terminated is not None and now - self._terminated > SAME_REQUEST_SECS:
                os._exit(128 + number)
            self._terminated = self._terminated or now
        _announced.append(name)
        self._requests.preempt(name)

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Stop at the next step on Ctrl-C. Raises KeyboardInterrupt if none is near, or twice."""
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted < SAME_INTERRUPT_SECS:
            return
        if self._interrupted is not None or not self._requests.steps:
            signal.default_int_handler(number, frame)
        self._interrupted = now
        if os.environ.get("RANK", "0") == "0":
            write_stderr(
                "torchrelay: Ctrl-C: saving at the next step, then exiting; repeat to exit at once\n"
            )
        self._requests.preempt(signal.Signals(number).name)


class Interrupted(BaseException):
    """Ends the running tasks at a step or boundary that all processes agreed on; never leaves `train`.

    Passes `except Exception`, as CancelledError does; `finally` blocks run.
    """
