"""`torchrelay dashboard`: the pages of a run store, live, for a browser."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchrelay.runners.commands.command_line_report import add_limits, limits_of
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.names import is_remote

if TYPE_CHECKING:
    from torchrelay.runners.dashboard.run_store import RunStore
    from torchrelay.runners.dashboard.server import DashboardServer

_PORT = 8321
_TOKEN = "TORCHRELAY_DASHBOARD_TOKEN"  # noqa: S105 - a variable's name
_NORM_BYTES = 64_000_000
"""By default less than a report reads, because a live page is made again and again."""


def add_dashboard(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
    parser = verb("dashboard", "serve the pages of runs, live, until Ctrl-C", dashboard)
    parser.add_argument("runs", metavar="RUNS", help="the directory or URL in which runs lie, or one run")
    parser.add_argument(
        "--port", type=_port, default=_PORT, metavar="P", help=f"default: {_PORT}; 0 takes any"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument(
        "--token",
        default=os.environ.get(_TOKEN),
        metavar="TEXT",
        help=f"who looks must know it; needed with another --host; better in {_TOKEN}, where no list of "
        "processes shows it",
    )
    add_limits(parser, _NORM_BYTES)


def dashboard(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGINT or SIGTERM, which end it at once, with 0."""
    from torchrelay.runners.dashboard.server import DashboardServer

    store = _store(chosen.runs)
    limits = limits_of(chosen)
    signal.signal(signal.SIGTERM, _stop)
    with (
        suppress(KeyboardInterrupt),  # also while the address is being told
        DashboardServer(store, chosen.host, chosen.port, chosen.token, limits) as server,
    ):
        _say(server, store, chosen, output)
        server.serve_forever(poll_interval=60)
    return 0


def _store(text: str) -> RunStore:
    if is_remote(text):
        from torchrelay.runners.dashboard.far_runs import FarRuns

        return FarRuns(text)
    from torchrelay.runners.dashboard.run_store import RunStore

    return RunStore(Path(text))


def _say(server: DashboardServer, store: RunStore, chosen: argparse.Namespace, output: Output) -> None:
    if output.json:
        output.value({"url": server.url, "runs": store.names(), "token": chosen.token is not None})
        return
    how = "?token=..." if chosen.token is not None else ""
    output.line(f"serving {store.shown} at {server.url}{how} (Ctrl-C ends it)")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)
