"""Processes that a trainer starts by multiprocessing stay while it leaves: workers of any loader, pools.

A launcher, Slurm or a terminal sends its signal to a whole process group. The trainer leaves at its next
step, and until then it needs its workers. So these ignore what the trainer takes for a request. SIGTERM they
have blocked, because loaders set it as they like, and a thread takes it in: it counts when the trainer sent
it (`terminate()`), and where the process has a handler of its own. The thread also ends the process when the
trainer is gone, however that came about.
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CALL = signal.SIGURG
"""Brings the main thread out of a wait, to call a handler; to a process that has none it is nothing."""
_POKE_SECS = 0.05
_LOOK_SECS = 1.0
"""How often a worker looks whether its trainer is there."""
_hooked = False


@contextmanager
def workers_stay(save: signal.Signals | None = None) -> Iterator[None]:
    """While the block runs multiprocessing starts such processes, whoever calls it. `save` asks for saves.

    Longer where a fork server was begun meanwhile: what it forks has its signals blocked.
    """
    global _hooked
    if _hooked:
        yield
        return
    process: Any = multiprocessing.process.BaseProcess
    util: Any = multiprocessing.util
    plain, spawn = process.start, util.spawnv_passfds
    ignored = (signal.SIGINT, signal.SIGUSR1, *([save] if save else []))

    def start(self: Any) -> None:
        own = self.__dict__.get("run")
        self.run = Staying(self, own, save, ignored)
        try:
            _with_blocked(ignored, plain, self)
        finally:
            del self.run
            self.__dict__.update({"run": own} if own else {})

    process.start, _hooked = start, True
    util.spawnv_passfds = lambda *words: _with_blocked(ignored, spawn, *words)  # servers of multiprocessing
    try:
        yield
    finally:
        util.spawnv_passfds = spawn
        if _fork_server() is None:
            process.start, _hooked = plain, False


def _with_blocked(ignored: tuple[signal.Signals, ...], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; processes that this starts inherit what is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *ignored})
    try:
        return call(*arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork_server() -> int | None:
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return getattr(server, "_forkserver_pid", None)


class Staying:
    """What the new process calls in the place of its `run`; it is pickled with it where it is spawned."""

    def __init__(
        self,
        process: Any,
        own: Callable[[], object] | None,
        save: signal.Signals | None,
        ignored: tuple[signal.Signals, ...],
    ) -> None:
        self.process, self.own, self.save, self.ignored = process, own, save, ignored
        self.trainer = os.getpid()
        self._due = False
        """Whether a handler of the process is still to be called."""

    def __call__(self) -> None:
        """Begin to take signals in, and run."""
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the handler of its trainer
        signal.signal(_CALL, self._call_handler)
        threading.Thread(target=self._watch, name="torchrelay signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.ignored)
        with workers_stay(self.save):
            type(self.process).run(self.process) if self.own is None else self.own()

    def _watch(self) -> None:
        parent = os.getppid()  # the trainer, or the server that forks for it
        while True:
            came = signal.sigtimedwait({signal.SIGTERM}, _POKE_SECS if self._due else _LOOK_SECS)
            if os.getppid() != parent or not _lives(self.trainer):
                os._exit(0)
            if came is not None and callable(signal.getsignal(signal.SIGTERM)):
                self._due = True
            elif came is not None and came.si_pid == self.trainer:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                os.kill(os.getpid(), signal.SIGTERM)
            if self._due:  # again and again: the main thread may be just before a wait
                signal.pthread_kill(threading.main_thread().ident or 0, _CALL)

    def _call_handler(self, _: int, frame: Any) -> None:
        """In the main thread: call what the process has set for SIGTERM."""
        handler, due = signal.getsignal(signal.SIGTERM), self._due
        self._due = False
        if due and callable(handler):
            handler(signal.SIGTERM, frame)


def _lives(process: int) -> bool:
    """Not where it only waits for its parent to look at how it ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
