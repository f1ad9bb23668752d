"""`torchrelay top|report|dashboard`: running jobs on a terminal, pages about runs in a file or served."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.storage.open import is_remote as in_store
from torchrelay.checkpoint.storage.open import object_at
from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import replace_file
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.console import Output, human_number
from torchrelay.runners.monitoring.status import RunLook, look_at, runs_at, standing
from torchrelay.runners.monitoring.text import duration, human_bytes, per_second
from torchrelay.runners.programs.request import add_token_options, port
from torchrelay.runners.remote_runs.names import for_a_glance, is_remote
from torchrelay.runners.remote_runs.resolve import existing_directory, locate_run
from torchrelay.tools.cli.arguments import Add, add_run
from torchrelay.tools.report.run_data import ReadLimits

if TYPE_CHECKING:
    from torchrelay.tools.report.page import RunIndex
    from torchrelay.tools.report.server import DashboardServer


_COLUMNS = ("run", "state", "epoch", "step", "rate", "eta", "last save")
_QUIET_SECS = 150.0
"""A rank leaves a line in its log every minute, or as often as the program says."""
_METRICS = 3
_NAMED_RANKS = 8


def add_top(add: Add) -> None:
    """Define `top`."""
    parser = add("watch running jobs: where they are, how quick, what was saved, what went wrong", top)
    add_run(parser, many=True)
    parser.add_argument("--once", action="store_true", help="print it once; so it is in a pipe, too")
    parser.add_argument(
        "--interval", type=_secs, default=2.0, metavar="S", help="seconds between looks (default: 2)"
    )


def top(chosen: argparse.Namespace, output: Output) -> int:
    """Show the runs at the paths; those that come and go meanwhile are shown from and up to then."""
    places = [_place(text) for text in chosen.path]
    looks = _looks(places)
    if output.json:
        output.value({"time": round(time.time(), 3), "runs": [look.json() for look in looks]})
    elif chosen.once or not output.rich:
        _print(looks, output, chosen.path)
    else:
        _watch(places, chosen.interval, output)
    return 0


def _place(text: str) -> Callable[[], list[Path]]:
    """What says, at each look, which runs are there now."""
    if not is_remote(text):
        return partial(runs_at, existing_directory(text))

    from torchrelay.runners.remote_runs.local_copies import mirror_of

    mirror = mirror_of(text)

    def runs() -> list[Path]:
        names = [""] if mirror.is_run() else mirror.names()
        return [mirror.run(name, for_a_glance).path for name in names]

    return runs


def _looks(places: Sequence[Callable[[], list[Path]]]) -> list[RunLook]:
    found = []
    for run in (run for place in places for run in place()):
        look, stands = look_at(run), standing(run)
        found.append(replace(look, state=stands.state(look.state), stands=stands.word, why=stands.why))
    return found


def _print(looks: Sequence[RunLook], output: Output, paths: Sequence[str]) -> None:
    if not looks:
        output.line(f"no run in {', '.join(paths)}")
        return
    output.table(_COLUMNS, [_cells(look) for look in looks])
    for look in looks:
        for note in _notes(look):
            output.line(note)


def _watch(places: Sequence[Callable[[], list[Path]]], every_secs: float, output: Output) -> None:
    from rich.live import Live

    looks: list[RunLook] = []
    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            trouble = []
            try:
                looks = _looks(places)
            except StorageError as error:  # a store may be away for a while; the next look shows it
                trouble = [f"as they were: {error}"]
            clock = time.strftime("%H:%M:%S UTC", time.gmtime())
            notes = [*trouble, *(note for look in looks for note in _notes(look))]
            notes.append(f"{clock}, {len(looks)} runs; Ctrl-C ends")
            live.update(output.renderable(_COLUMNS, [_cells(look) for look in looks], notes), refresh=True)
            time.sleep(every_secs)


def _cells(look: RunLook) -> tuple[str, ...]:
    state = look.why if look.stands == "silent" else look.stands
    if look.unreadable and look.stands == "interrupted":
        state = "unreadable"
    elif look.stands == "running" and look.silent_secs is not None:
        state += f" (silent {duration(look.silent_secs)})"
    return (
        look.name,
        state,
        _of(look.epoch, look.last_epoch),
        _of(look.step, look.steps) if look.step else "",
        "" if look.per_sec is None else per_second(look.per_sec, look.unit),
        "" if look.eta_secs is None else duration(look.eta_secs),
        look.ckpt.removeprefix("ckpt "),
    )


def _of(done: int | None, whole: int | None) -> str:
    return "" if done is None else str(done) if whole is None else f"{done}/{whole}"


def _values(metrics: Mapping[str, Any]) -> str:
    shown = sorted(metrics.items())[:_METRICS]
    return " ".join(
        f"{name} {human_number(value) if isinstance(value, (int, float)) else value}" for name, value in shown
    )


def _notes(look: RunLook) -> list[str]:
    """One line with what needs more room than a cell."""
    warned = f"{look.warnings} warnings, the last: {look.last_warning}" if look.warnings else ""
    slowest = ""
    if look.slowest is not None and len(look.ranks) != 1:  # of a single rank there is nobody who waits
        slowest = f"slowest node {look.slowest[0]} {look.slowest[1]:.1f}s"
    why = look.why if look.stands == "interrupted" and look.why != look.unreadable else ""
    notes = [why, _values(look.metrics), slowest, _quiet(look), look.doing, look.unreadable, warned]
    found = " | ".join(note for note in notes if note)
    return [f"{look.name}: {found}"] if found else []


def _quiet(look: RunLook) -> str:
    """The ranks that have said nothing while another did: frozen, lost, or on a host that is away."""
    if look.stands != "running" or not look.ranks:
        return ""
    newest = min(look.ranks.values())
    quiet = sorted(rank for rank, secs in look.ranks.items() if secs - newest > _QUIET_SECS)
    named = ", ".join(map(str, quiet[:_NAMED_RANKS])) + (", ..." if quiet[_NAMED_RANKS:] else "")
    return f"long no line from rank {named}, of {len(look.ranks)}" if quiet else ""


def _secs(text: str) -> float:
    try:
        secs = float(text)
    except ValueError:
        secs = -1.0
    if not 0.1 <= secs <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number of seconds from 0.1")
    return secs


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_report(add: Add) -> None:
    """Add the verb to the parser."""
    parser = add("write one page about runs, to be opened in a browser", report)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory or its URL; several are laid over each other"
    )
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser, most_bytes: int = ReadLimits.norm_bytes) -> None:
    """Add what bounds the bytes that are read of weights, by default `most_bytes`."""
    parser.add_argument("--no-norms", action="store_true", help="read no weights")
    parser.add_argument(
        "--max-bytes",
        type=_size,
        default=most_bytes,
        metavar="N",
        help=f"weights read for norms, of each run, such as 500M (default: {human_bytes(most_bytes)})",
    )


def limits_of(chosen: argparse.Namespace) -> ReadLimits:
    """The limits that a command line asks for."""
    return ReadLimits(norm_bytes=0 if chosen.no_norms else chosen.max_bytes)


def report(chosen: argparse.Namespace, output: Output) -> int:
    """Write the page; what could not be read of a run is said in it, and counted here."""
    from torchrelay.tools.report.gather import gather
    from torchrelay.tools.report.page import report_page

    found: dict[Path, RunDirectory] = {}
    for path in chosen.runs:
        run = locate_run(path, whole=False)
        found.setdefault(run.path.resolve(), run)
    runs = list(found.values())
    target = None if in_store(chosen.output) else Path(chosen.output)
    if target is not None:
        _check_target(target, runs)
    facts = [gather(run, limits_of(chosen)) for run in runs]
    page = report_page(facts).encode()
    if target is None:
        storage, name = object_at(chosen.output, "the page")
        storage.replace(name, page)
    else:
        replace_file(target, page, sync="nothing")
    trouble = [text for run in facts for text in run.trouble]
    if output.json:
        output.value(
            {
                "output": chosen.output if target is None else str(target),
                "bytes": len(page),
                "runs": [run.name for run in facts],
                "trouble": trouble,
            }
        )
        return 0
    for text in trouble:
        output.notice(text)
    output.line(f"wrote {chosen.output} ({human_bytes(len(page))}): {', '.join(run.name for run in facts)}")
    return 0


def _check_target(target: Path, runs: list[RunDirectory]) -> None:
    """Refuse, before anything is read, a place where the page cannot lie."""
    if target.is_dir():
        raise UsageError(f"{target} is a directory: give -o the name of a file")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.parent} is no directory: make it, or give -o another place")
    for run in runs:
        if target.resolve().is_relative_to((run.path / "checkpoints").resolve()):
            raise UsageError(f"{target} lies among the checkpoints of {run.where}: give -o another place")


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].lower()) if text and text[-1].lower() in "kmgt" else (text, "")
    if not (number.isascii() and number.isdecimal()) or len(number) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 500M or 2G")
    return int(number) * _UNITS[unit]


_PORT = 8321
_TOKEN = "TORCHRELAY_DASHBOARD_TOKEN"  # noqa: S105 - a variable's name
_NORM_BYTES = 64_000_000
"""By default less than a report reads, because a live page is made again and again."""


def add_dashboard(add: Add) -> None:
    """Add the verb to the parser."""
    parser = add("serve the pages of runs, live, until Ctrl-C", dashboard)
    parser.add_argument("runs", metavar="RUNS", help="the directory or URL in which runs lie, or one run")
    parser.add_argument(
        "--port", type=port, default=_PORT, metavar="P", help=f"default: {_PORT}; 0 takes any"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    add_token_options(parser, os.environ.get(_TOKEN))
    add_limits(parser, _NORM_BYTES)


def dashboard(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGINT or SIGTERM, which end it at once, with 0."""
    from torchrelay.tools.serving.serve import check_installed

    check_installed("the dashboard")
    from torchrelay.tools.report.page import FarRuns, RunIndex
    from torchrelay.tools.report.server import DashboardServer
    from torchrelay.tools.serving.web import read_token

    store: RunIndex = FarRuns(chosen.runs) if is_remote(chosen.runs) else RunIndex(Path(chosen.runs))
    token = read_token(chosen.token, chosen.token_file)
    server = DashboardServer(store, chosen.host, chosen.port, token, limits_of(chosen))
    with server.socket:
        server.ready = lambda: _say(server, store, token, output)
        server.run(sockets=[server.socket])
    return 0


def _say(server: DashboardServer, store: RunIndex, token: str | None, output: Output) -> None:
    if output.json:
        output.value({"url": server.url, "runs": store.names(), "token": token is not None})
        return
    how = "?token=..." if token is not None else ""
    output.line(f"serving {store.shown} at {server.url}{how} (Ctrl-C ends it)")
