"""Exit of a job's process: exit code, messages, workers, and subcommands that wait for their script.

Live DDP objects of several ranks abort in the interpreter's shutdown, so a launched process destroys its
groups and exits by `os._exit` after flushing its output.

A launcher, Slurm or a terminal signals a whole process group, but the trainer needs its workers until its
next step. So workers ignore the signals that the trainer treats as requests. They block SIGTERM, and a thread
receives it: it takes effect if the trainer sent it (`terminate()`) or the process has its own handler. The
thread also ends the process when the trainer is gone.

A request of `torchrelay SUBCOMMAND script.py` waits from the start of the script to its `torchrelay.main`.
Until then the script must only define its class; a job that it runs itself was not requested.
"""

from __future__ import annotations

import io
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

from torchrelay.errors import (
    LeftByInterrupt,
    PeerError,
    PreemptedError,
    RelayError,
    TaskFailedError,
    UsageError,
    exit_code_of,
)
from torchrelay.runners.distributed.launcher import (
    current_world,
    end_process,
    launcher_restarts,
    write_stderr,
)
from torchrelay.runners.session.stop_requests import ignore_termination, nothing_follows
from torchrelay.runners.training.plan import RunResult

if TYPE_CHECKING:
    from torchrelay.runners.distributed.world import World


MEET_SECS = 30.0


def run_and_leave(work: Callable[[], int | None]) -> NoReturn:
    """Run a program's `work` and exit with its code (None is 0), or with the code of its error.

    torchrelay's own errors are printed as one line; a failed user step, and any other exception, with
    traceback. In a launched job the other ranks are notified and end too. Does not return.
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
    """Return the exit code of a run that ended without an error.

    A launcher with restarts left would immediately restart a preempted run, so for it the code is 0. If only
    another host is preempted, the launcher must restart with the remaining hosts, so the code stays 75.
    """
    if result.status != "PREEMPTED":
        return 0
    return 0 if launcher_restarts() and not result.elsewhere else PreemptedError.exit_code


def leave(code: int, *, meet_secs: float = MEET_SECS) -> NoReturn:
    """Exit with `code`, as all ranks do at the end of a launched job.

    After success or a preemption it waits for the other ranks for at most `meet_secs`, destroys the groups
    created by torchrelay, flushes the output, and ends by `os._exit` under a launcher, by SystemExit
    otherwise. A failure of another rank meanwhile determines the code.
    """
    world: World | None = current_world()
    if code == PreemptedError.exit_code:
        ignore_termination()
    if world is None:
        sys.exit(code)
    try:
        met = world.wait_for_all_ranks(meet_secs) if code in (0, PreemptedError.exit_code) else True
        failure = world.watcher.failure if world.watcher else None
        if failure is not None:
            code = code or failure.exit_code
        elif not met:
            _say(world, f"exited without {world.late_ranks()}, which did not finish within {meet_secs:g} s")
        world.close()
    except PeerError as error:
        code = code or error.exit_code
        _say(world, str(error))
    logging.shutdown()
    if world.env.launched:
        end_process(code)
    sys.exit(code)


def _fail(error: BaseException, where: str = "") -> int:
    """Print an error, after `where`, and report it to the other ranks; returns the exit code."""
    from torchrelay.jobs.config.tree import ConfigError

    world: World | None = current_world()
    if isinstance(error, TaskFailedError) and error.details:
        shown = f"{type(error).__name__}: {error}\n{error.details.rstrip()}"
    elif isinstance(error, ConfigError):
        shown = f"{error}"
    elif isinstance(error, RelayError) and not isinstance(error, TaskFailedError):
        shown = f"{type(error).__name__}: {error}"
    else:  # a mistake of the program
        shown = "".join(traceback.format_exception(error)).rstrip()
    if world is not None and not isinstance(error, PreemptedError):
        world.blame("the program", error, shown)
    first = world.watcher.failure if world and world.watcher else None
    if first is None:
        _say(world, where + shown)
        if world is None:
            return exit_code_of(error)
        from torchrelay.runners.distributed.world import code_of

        return code_of(error)
    # The watcher has printed the first failure, which may be this error or the same on another rank.
    if world is not None and first.rank != world.env.rank and first.traceback != shown:
        _say(world, where + shown)
    return first.exit_code


def report_uncaught(error: RelayError | LeftByInterrupt) -> int:
    """Print an error that ends a script, without frames of torchrelay; returns the exit code."""
    if isinstance(sys.stderr, io.StringIO):  # the hook of torch.distributed, which does not get to print it
        sys.stderr = sys.__stderr__
    if isinstance(error, LeftByInterrupt):
        if os.environ.get("RANK", "0") == "0":
            write_stderr(f"torchrelay: {error}\n")
        return error.exit_code
    foreign = {"torchrelay", "torch", *sys.stdlib_module_names} - {"__main__"}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if str(frame.f_globals.get("__name__")).partition(".")[0] not in foreign]
    named = isinstance(error, UsageError) and own  # the program's call that failed
    try:
        return _fail(error, f"{own[-1].f_code.co_filename}:{own[-1].f_lineno}: " if named else "")
    except KeyboardInterrupt:  # while the other ranks are notified
        return error.exit_code


def _say(world: World | None, text: str) -> None:
    """Print a line to stderr, with the rank if there are several."""
    rank = f"[rank {world.env.rank}] " if world and world.env.world_size > 1 else ""
    write_stderr(f"torchrelay: {rank}{text}\n")


_pending: list[tuple[Any, str]] = []  # pending requests of `programs`, each with its script


def hand_over(request: Any, script: str = "") -> None:
    """Make the next `main` execute this request instead of the command line; None cancels it."""
    _pending[:] = [] if request is None else [(request, script)]


def taken() -> Any:
    """Return the pending request, once; None if the script was started directly."""
    return _pending.pop()[0] if _pending else None


def refuse_before_main() -> None:
    """Raise UsageError for a training while a request waits for the script's `torchrelay.main`."""
    for request, script in _pending:
        raise UsageError(
            f"{script} trains a job itself (JobRunner): start it with python or torchrun; `torchrelay "
            f"{request.verb}` needs a script that ends with torchrelay.main(...) and does not train before"
        )


_CALL = signal.SIGURG
"""Interrupts a wait of the main thread to call a handler; ignored by processes without one."""
_POKE_SECS = 0.05
_LOOK_SECS = 1.0  # interval at which a worker checks if its trainer exists
_hooked = False


@contextmanager
def workers_stay(save: signal.Signals | None = None) -> Iterator[None]:
    """While the block runs, start workers that outlive stop signals and the signal `save`."""
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
    """Call with signals blocked, so that started processes inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *ignored})
    try:
        return call(*arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Staying:
    """Replacement of a process's `run`; pickled with it if it is spawned."""

    def __init__(
        self,
        process: Any,
        own: Callable[[], object] | None,
        save: signal.Signals | None,
        ignored: tuple[signal.Signals, ...],
    ) -> None:
        self.process, self.own, self.save, self.ignored = process, own, save, ignored
        self.trainer = os.getpid()
        self._due = False  # true if a handler of the process is still to be called

    def __call__(self) -> None:
        """Start the thread that receives signals, and run."""
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
            if self._due:  # repeatedly: the main thread may be just before a wait
                signal.pthread_kill(threading.main_thread().ident or 0, _CALL)

    def _call_handler(self, _: int, frame: Any) -> None:
        """In the main thread: call the process's handler of SIGTERM."""
        handler, due = signal.getsignal(signal.SIGTERM), self._due
        self._due = False
        if due and callable(handler):
            handler(signal.SIGTERM, frame)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
