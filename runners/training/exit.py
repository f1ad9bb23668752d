"""How a process of a job ends: its code, its words, its workers; and a verb that waits for its script.

Live DDP objects of several ranks abort in the interpreter's shutdown after success, so a launched
process destroys its groups and leaves by `os._exit`, having flushed what it printed.

A launcher, Slurm or a terminal sends its signal to a whole process group. The trainer leaves at its next
step, and until then it needs its workers. So these ignore what the trainer takes for a request. SIGTERM they
have blocked, because loaders set it as they like, and a thread takes it in: it counts when the trainer sent
it (`terminate()`), and where the process has a handler of its own. The thread also ends the process when the
trainer is gone, however that came about.

A verb that `torchrelay VERB script.py` has read is handed over from the start of the script to its
`torchrelay.main`; until then the script only defines its class. A job that it runs itself meanwhile was not
asked for, least of all by `status`, which writes nothing.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrelay.errors import PeerError, PreemptedError, RelayError, TaskFailedError, UsageError, exit_code_of
from torchrelay.runners.distributed.environment import current_world, launcher_restarts
from torchrelay.runners.distributed.launcher_status import end_process, write_stderr
from torchrelay.runners.session.stop_requests import ignore_termination, nothing_follows
from torchrelay.runners.training.plan import RunResult

if TYPE_CHECKING:
    from torchrelay.runners.distributed.world import World


MEET_SECS = 30.0


def run_and_leave(work: Callable[[], int | None]) -> NoReturn:
    """Run a program's `work` and end the process with its code (None is 0), or with its error's.

    An error of ours is one line, because it says what to do; where a step of the user raised, and
    for every other exception, the traceback is shown. In a launched job the others hear of it and
    end too. Does not return, not even after an error.
    """
    try:
        with nothing_follows():
            code = work() or 0
    except SystemExit as request:
        if isinstance(request.code, int) or request.code is None:
            code = request.code or 0
        else:
            write_stderr(f"{request.code}\n")
            code = 1
    except KeyboardInterrupt as error:
        code = exit_code_of(error)
    except BaseException as error:
        code = _fail(error)
    leave(code)


def code_of_result(result: RunResult) -> int:
    """The code of a run that ended without an error.

    A launcher with restarts left would start a preempted run again at once, in the time that it has to go:
    for it the run has ended well. Not so where another host alone has to go: there the launcher shall start
    again, with the hosts that stay, and would else wait five minutes for the agent that is gone.
    """
    if result.status != "PREEMPTED":
        return 0
    return 0 if launcher_restarts() and not result.elsewhere else PreemptedError.exit_code


def leave(code: int, *, meet_secs: float = MEET_SECS) -> NoReturn:
    """End this process with `code`, as all ranks do at the end of a launched job.

    After success, and when the run is to be continued, it meets the others at the store for at most
    `meet_secs`, destroys the groups that torchrelay made, flushes, and ends by `os._exit` under a launcher
    (no exit handlers run), by SystemExit otherwise. A failure of another rank meanwhile gives its code.
    """
    world: World | None = current_world()
    if code == PreemptedError.exit_code:
        ignore_termination()
    if world is None:
        sys.exit(code)
    try:
        code = _close(world, code, meet_secs)
    except PeerError as error:
        code = code or error.exit_code
        _say(world, str(error))
    logging.shutdown()
    if world.env.launched:
        end_process(code)
    sys.exit(code)


def _close(world: World, code: int, meet_secs: float) -> int:
    met = world.wait_for_all_ranks(meet_secs) if code in (0, PreemptedError.exit_code) else True
    failure = world.watcher.failure if world.watcher else None
    if failure is not None:
        code = code or failure.exit_code
    elif not met:
        _say(world, f"left without {world.late_ranks()}, which did not come within {meet_secs:g} s")
    world.close()
    return code


def _fail(error: BaseException) -> int:
    """Show an error and make it known to the others; return the code to end with."""
    world: World | None = current_world()
    shown = message_of(error)
    if world is not None and not isinstance(error, PreemptedError):
        world.blame("the program", error, shown)
    first = world.watcher.failure if world and world.watcher else None
    if first is None:
        _say(world, shown)
        if world is None:
            return exit_code_of(error)
        from torchrelay.runners.distributed.world import code_of

        return code_of(error)
    # The watcher printed the first failure; it may be this very error, or the same on another rank.
    if world is not None and first.rank != world.env.rank and first.traceback != shown:
        _say(world, shown)
    return first.exit_code


def message_of(error: BaseException) -> str:
    """Return what a user needs to see: one line for our own errors, a traceback for the others'.

    Of a failed step it is the user's part of the traceback; how it was called is no help.
    """
    from torchrelay.jobs.config.tree import ConfigError

    if isinstance(error, TaskFailedError) and error.details:
        return f"{type(error).__name__}: {error}\n{error.details.rstrip()}"
    if isinstance(error, ConfigError):
        return f"{error}"
    if isinstance(error, RelayError) and not isinstance(error, TaskFailedError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _say(world: World | None, text: str) -> None:
    rank = f"[rank {world.env.rank}] " if world and world.env.world_size > 1 else ""
    write_stderr(f"torchrelay: {rank}{text}\n")


_handed: list[tuple[Any, str]] = []
"""Requests, as `programs` reads them, and who is to act on them."""


def hand_over(request: Any, script: str = "") -> None:
    """Have the next `main` that acts do this instead of reading the command line; None takes it back."""
    _handed[:] = [] if request is None else [(request, script)]


def taken() -> Any:
    """What was handed over, once; None where the script was started by itself."""
    return _handed.pop()[0] if _handed else None


def refuse_before_main() -> None:
    """Refuse to train where a verb still waits for the script's `torchrelay.main`; raises UsageError."""
    for request, script in _handed:
        raise UsageError(
            f"{script} trains a job by itself (JobRunner): start it with python or torchrun; `torchrelay "
            f"{request.verb}` takes scripts that end with torchrelay.main(...), and train nothing before it"
        )


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
        server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
        if getattr(server, "_forkserver_pid", None) is None:
            process.start, _hooked = plain, False


def _with_blocked(ignored: tuple[signal.Signals, ...], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; processes that this starts inherit what is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *ignored})
    try:
        return call(*arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
