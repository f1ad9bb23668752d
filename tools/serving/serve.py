"""From a source and options to a server that runs until it is told to leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from torchrelay.runners.programs.request import ServeOptions
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.handlers import ModelSource


def check_installed(what: str = "serving") -> None:
    """Raises UsageError where the extra is missing, or several ranks were started."""
    missing = []
    for name in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: pip install 'torchrelay[serve]'")
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
    from torchrelay.tools.serving.handlers import ModelSlot
    from torchrelay.tools.serving.monitoring import Watching
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
    from torchrelay.tools.serving.errors import takes

    if takes(sys.stdout):
        print(text, file=sys.stdout, flush=True)


def _leave_now() -> NoReturn:
    """End the process with 0 while a thread is inside of torch: the interpreter's own end would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
