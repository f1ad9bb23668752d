"""Python programs that start at once: forks of this process, which has imported what they import.

While the block of `forked_programs` runs, every `subprocess.Popen` of this interpreter forks instead of
starting another one, in the forked processes too. So torchrun, the agents of a launch and the ranks are the
real programs, each a process of its own with its environment, groups and signals.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def forked_programs() -> Iterator[None]:
    """While the block runs interpreters are forks."""
    kind: Any = subprocess.Popen
    plain = kind._execute_child

    def execute(self: Any, args: Any, executable: Any, preexec: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell = rest[:6]
        pipes, new_session = rest[6:12], rest[17]
        words = [] if shell or isinstance(args, (str, bytes)) else [one for one in args if one != "-u"]
        if not words or words[0] != sys.executable or (words[1] != "-m" and not words[1].endswith(".py")):
            plain(self, args, executable, preexec, close_fds, *rest)
            return
        child = os.fork()
        if child == 0:
            _be_child(words[1:], pass_fds, cwd, env, (pipes[0], pipes[3], pipes[5]), bool(new_session))
        self.pid, self._child_created = child, True
        self._close_pipe_fds(*pipes)

    kind._execute_child = execute
    try:
        yield
    finally:
        kind._execute_child = plain


def _be_child(
    words: Sequence[str],
    pass_fds: Sequence[int],
    cwd: str | None,
    env: Mapping[str, str] | None,
    streams: Sequence[int],
    new_session: bool,
) -> None:
    """Become the program and end with its code."""
    code = 1
    try:
        if new_session:
            os.setsid()
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        _close_all_but({0, 1, 2, *pass_fds})
        _forget_handlers()
        if env is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
        os.chdir(cwd or ".")
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue


def _forget_handlers() -> None:
    """As `exec` does: what is handled has its default again, what is ignored stays so."""
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(words: Sequence[str]) -> int:
    """Run a script, or `-m module`, with its arguments; its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
