"""Run the server until a signal; HTTP errors."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from torchrelay.errors import UsageError, install_command
from torchrelay.runners.monitoring.console import print_line

if TYPE_CHECKING:
    from torchrelay.runners.programs.request import ServeOptions
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.handlers import ModelSource


BUSY_SECS = 1
"""Value of Retry-After under load."""


class RefusedError(Exception):
    """A refused request: status, one sentence for the client, and `retry_secs` for Retry-After (429, 503)."""

    def __init__(self, status: int, text: str, retry_secs: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.retry_secs = status, text, retry_secs


def wrong(text: str, status: int = 400) -> RefusedError:
    """Return the error for an invalid request."""
    return RefusedError(status, text)


def busy(text: str) -> RefusedError:
    """Return the error 429, too many requests."""
    return RefusedError(429, text, BUSY_SECS)


def unavailable(text: str, retry_secs: int = BUSY_SECS) -> RefusedError:
    """Return the error 503, unavailable."""
    return RefusedError(503, text, retry_secs)


class FaultyAnswerError(RuntimeError):
    """The model returned an invalid answer for valid samples: 500."""


_BYTES = 4096
"""Size of an atomic write to a pipe (PIPE_BUF of Linux)."""


def tell(what: str, more: str) -> None:
    """Write a line and the end of its details; dropped if stderr is closed, or a full pipe."""
    text = more.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if takes(sys.stderr):
            sys.stderr.write(f"{what}\n{text[len(what) + 1 - _BYTES :]}")
            sys.stderr.flush()


def takes(stream: TextIO | None) -> bool:
    """Return True if a short write does not block."""
    try:
        descriptor = stream.fileno()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return stream is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


def check_installed(what: str = "serving") -> None:
    """Raise UsageError if packages are missing, or several ranks were started."""
    missing = []
    for name in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: {install_command('serve')}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a server is a single process: start it without torchrun")


def serve(
    options: ServeOptions,
    source: Callable[[], ModelSource],
    *,
    began: Callable[[Running], None] = lambda running: None,
) -> int:
    """Bind the address, to report an unusable one soon; load and serve; return the exit code."""
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
            raise UsageError("--watch follows last or best, but a numbered epoch or a package never changes")
        holder = ModelSlot(found.first())
        watching = Watching(found, say) if options.watch else None
        running = Running(holder, listening, limits, access, watching)
        began(running)
        served = holder.current
        what = served.name if served.epoch is None else f"epoch {served.epoch} of {served.name}"
        running.run(lambda: say(f"serving {what} at {url_of(listening)}"))
        say("left")
        if not running.ended():
            # A normal exit would abort while a thread is inside torch.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(0)
    return 0


def say(text: str) -> None:
    """Write a log line; dropped if stdout is a full or closed pipe."""
    if takes(sys.stdout):
        print_line(text, required=False)
