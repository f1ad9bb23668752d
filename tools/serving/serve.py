"""From a source and options to a server that runs until it is told to leave; refusals in words of HTTP."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from torchrelay.errors import UsageError, install_command

if TYPE_CHECKING:
    from torchrelay.runners.programs.request import ServeOptions
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.handlers import ModelSource


BUSY_SECS = 1
"""When to come again where there is too much to do."""


class RefusedError(Exception):
    """A request that is not answered: a status and one sentence for the client.

    Below 500 it is the client's; 429 and 503 say when to come again (`retry_secs`).
    """

    def __init__(self, status: int, text: str, retry_secs: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.retry_secs = status, text, retry_secs


def wrong(text: str, status: int = 400) -> RefusedError:
    """A request that cannot be understood."""
    return RefusedError(status, text)


def busy(text: str) -> RefusedError:
    """Too much is asked at once: 429."""
    return RefusedError(429, text, BUSY_SECS)


def unavailable(text: str, retry_secs: int = BUSY_SECS) -> RefusedError:
    """The server cannot answer now: 503."""
    return RefusedError(503, text, retry_secs)


class FaultyAnswerError(RuntimeError):
    """What the model made of good samples is no answer: the fault is on this side, so that it is a 500."""


_BYTES = 4096
"""What a pipe that is ready takes at once (PIPE_BUF of Linux)."""


def tell(what: str, more: str) -> None:
    """Write a line and the end of what belongs to it, at most 4096 bytes of ASCII.

    Both are dropped where stderr is closed, or a pipe that nobody empties.
    """
    text = more.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if takes(sys.stderr):
            sys.stderr.write(f"{what}\n{text[len(what) + 1 - _BYTES :]}")
            sys.stderr.flush()


def takes(stream: TextIO | None) -> bool:
    """Whether a short write does not wait; what is no file of the system never does."""
    try:
        descriptor = stream.fileno()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return stream is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


def check_installed(what: str = "serving") -> None:
    """Raises UsageError where the extra is missing, or several ranks were started."""
    missing = []
    for name in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: {install_command('serve')}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a server is one process: start it without torchrun")


def serve(
    options: ServeOptions,
    source: Callable[[], ModelSource],
    *,
    began: Callable[[Running], None] = lambda running: None,
) -> int:
    """Take the address, load, serve, and return the exit code when it was told to leave.

    The address is taken first, so that one that cannot be had costs no loading; nobody is answered before
    the model is there.
    """
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.batching import Watching
    from torchrelay.tools.serving.handlers import ModelSlot
    from torchrelay.tools.serving.web import access_at, bound_socket, read_token, url_of

    limits, token = options.limits(), read_token(options.token, options.token_file)
    access_at(options.host, options.port, token)
    with bound_socket(options.host, options.port) as listening:
        access = access_at(options.host, listening.getsockname()[1], token)
        found = source()
        if options.watch and not getattr(found, "follows", False):
            raise UsageError(
                "--watch follows last or best: an epoch by its number, or a package, never changes"
            )
        holder = ModelSlot(found.first())
        watching = Watching(found, say) if options.watch else None
        running = Running(holder, listening, limits, access, watching)
        began(running)
        served = holder.current
        what = served.name if served.epoch is None else f"epoch {served.epoch} of {served.name}"
        running.run(lambda: say(f"serving {what} at {url_of(listening)}"))
        say("left")
        if not running.ended():
            _leave_now()
    return 0


def say(text: str) -> None:
    """A line for whoever reads the log; dropped where that is a pipe which nobody empties."""
    if takes(sys.stdout):
        print(text, file=sys.stdout, flush=True)


def _leave_now() -> NoReturn:
    """End the process with 0 while a thread is inside of torch: the interpreter's own end would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
