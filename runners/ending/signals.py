"""Signals that ask a run to leave, or to save: their handlers raise a request and do nothing else.

A handler of Python does not run inside a collective; there the other ranks, which come to the next step,
bring the process out of it. Ctrl-C is such a request where a step is near; elsewhere, and when it comes
again, it interrupts as ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.runners.distributed.launcher_status import tell_stderr
from torchrelay.runners.ending.requests import Requests

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
    handler = _Handler(requests)
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


class _Handler:
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
            tell_stderr("torchrelay: Ctrl-C: saving at the next step, to leave; once more leaves at once\n")
        self._requests.preempt(signal.Signals(number).name)
