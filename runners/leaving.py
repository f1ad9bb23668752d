"""How a process of a job ends: the right code, the right words, and no abort on the way out.

Live DDP objects of several ranks abort in the interpreter's shutdown after success, so a launched
process destroys its groups and leaves by `os._exit`, having flushed what it printed.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from torchrelay.errors import PeerError, PreemptedError, RelayError, TaskFailedError, exit_code_of
from torchrelay.runners.distributed.environment import current_world, launcher_restarts
from torchrelay.runners.distributed.launcher_status import end_process, tell_stderr
from torchrelay.runners.result import RunResult
from torchrelay.runners.session.stop_requests import ignore_termination, nothing_follows

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
        code = _code_of(request)
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
    world = current_world()
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
    met = world.meet_at_the_end(meet_secs) if code in (0, PreemptedError.exit_code) else True
    failure = world.watcher.failure if world.watcher else None
    if failure is not None:
        code = code or failure.exit_code
    elif not met:
        _say(world, f"left without {world.late_at_the_end()}, which did not come within {meet_secs:g} s")
    world.close()
    return code


def _fail(error: BaseException) -> int:
    """Show an error and make it known to the others; return the code to end with."""
    world = current_world()
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


def _code_of(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    tell_stderr(f"{request.code}\n")
    return 1


def _say(world: World | None, text: str) -> None:
    rank = f"[rank {world.env.rank}] " if world and world.env.world_size > 1 else ""
    tell_stderr(f"torchrelay: {rank}{text}\n")
