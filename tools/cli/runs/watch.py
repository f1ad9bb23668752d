"""`torchrelay top|report|dashboard`: monitor jobs in a terminal, write or serve HTML reports."""

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
from torchrelay.runners.monitoring.console import Argument, Output, arg, flag, human_number, verb
from torchrelay.runners.monitoring.status import RunLook, look_at, runs_at, standing
from torchrelay.runners.monitoring.text import duration, human_bytes, per_second
from torchrelay.runners.programs.request import address_options, token_options
from torchrelay.runners.remote_runs.names import for_a_glance, is_remote
from torchrelay.runners.remote_runs.resolve import existing_directory, locate_run_or_checkpoints
from torchrelay.tools.cli.arguments import RUNS
from torchrelay.tools.report.run_data import ReadLimits

if TYPE_CHECKING:
    from torchrelay.tools.report.server import RunIndex


_COLUMNS = ("run", "state", "epoch", "step", "rate", "eta", "last save")
_QUIET_SECS = 150.0
"""Ranks log a line every minute by default."""
_METRICS = 3
_NAMED_RANKS = 8


def _secs(text: str) -> float:
    try:
        secs = float(text)
    except ValueError:
        secs = -1.0
    if not 0.1 <= secs <= 86400:
        raise argparse.ArgumentTypeError(f"invalid interval {text!r:.40}: expected seconds, at least 0.1")
    return secs


@verb(
    "monitor running jobs: progress, speed, saves and problems",
    RUNS,
    flag("--once", "print once and exit (default in a pipe)"),
    arg("--interval", "seconds between updates (default: 2)", "S", type=_secs, default=2.0),
)
def top(chosen: argparse.Namespace, output: Output) -> int:
    """Show the runs at the paths, including runs that appear later."""
    places = [_place(text) for text in chosen.path]
    looks = _looks(places)
    if output.json:
        output.value({"time": round(time.time(), 3), "runs": [look.json() for look in looks]})
    elif chosen.once or not output.rich:
        if looks:
            output.table(_COLUMNS, [_cells(look) for look in looks])
        else:
            output.line(f"no runs in {', '.join(chosen.path)}")
        for note in (note for look in looks for note in _notes(look)):
            output.line(note)
    else:
        _watch(places, chosen.interval, output)
    return 0


def _place(text: str) -> Callable[[], list[Path]]:
    """Return a function that lists the current runs of a place."""
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


def _watch(places: Sequence[Callable[[], list[Path]]], every_secs: float, output: Output) -> None:
    from rich.live import Live

    looks: list[RunLook] = []
    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            trouble = []
            try:
                looks = _looks(places)
            except StorageError as error:  # perhaps temporary: try again at the next update
                trouble = [f"not updated: {error}"]
            clock = time.strftime("%H:%M:%S UTC", time.gmtime())
            notes = [*trouble, *(note for look in looks for note in _notes(look))]
            notes.append(f"{clock}, {len(looks)} runs; Ctrl-C to quit")
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
    """Return one line with details that do not fit in the table."""
    warned = f"{look.warnings} warnings, the last: {look.last_warning}" if look.warnings else ""
    slowest = ""
    if look.slowest is not None and len(look.ranks) != 1:  # with a single rank no other rank waits
        slowest = f"slowest node {look.slowest[0]} {look.slowest[1]:.1f}s"
    why = look.why if look.stands == "interrupted" and look.why != look.unreadable else ""
    # Ranks that stopped logging while others continued: frozen, lost or unreachable.
    ranks = look.ranks if look.stands == "running" else {}
    newest = min(ranks.values(), default=0.0)
    quiet = sorted(rank for rank, secs in ranks.items() if secs - newest > _QUIET_SECS)
    named = ", ".join(map(str, quiet[:_NAMED_RANKS])) + (", ..." if quiet[_NAMED_RANKS:] else "")
    silent = f"no recent log lines from rank {named} of {len(ranks)}" if quiet else ""
    notes = [why, _values(look.metrics), slowest, silent, look.doing, look.unreadable, warned]
    found = " | ".join(note for note in notes if note)
    return [f"{look.name}: {found}"] if found else []


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].lower()) if text and text[-1].lower() in "kmgt" else (text, "")
    if not (number.isascii() and number.isdecimal()) or len(number) > 15:
        raise argparse.ArgumentTypeError(
            f"invalid size {text!r}: expected a number of bytes such as 500M or 2G"
        )
    return int(number) * _UNITS[unit]


def limits(most_bytes: int = ReadLimits.norm_bytes) -> tuple[Argument, ...]:
    """Return the options that limit the bytes read from weights, by default `most_bytes`."""
    text = f"bytes of weights to read per run, such as 500M (default: {human_bytes(most_bytes)})"
    return (
        flag("--no-norms", "do not read weights"),
        arg("--max-bytes", text, "N", type=_size, default=most_bytes),
    )


def limits_of(chosen: argparse.Namespace) -> ReadLimits:
    """Return the limits given on the command line."""
    return ReadLimits(norm_bytes=0 if chosen.no_norms else chosen.max_bytes)


@verb(
    "write an HTML report on runs",
    arg("runs", "run directory or URL; several runs share the charts", "RUN", nargs="+"),
    arg("-o --output", "file to write (default: report.html)", "FILE", default="report.html"),
    *limits(),
)
def report(chosen: argparse.Namespace, output: Output) -> int:
    """Write the report; unreadable parts of a run are listed in it and on stderr."""
    from torchrelay.tools.report.gather import gather
    from torchrelay.tools.report.page import report_page

    found: dict[Path, RunDirectory] = {}
    for path in chosen.runs:
        run = locate_run_or_checkpoints(path)
        found.setdefault(run.path.resolve(), run)
    runs = list(found.values())
    target = None if in_store(chosen.output) else Path(chosen.output)
    if target is not None:  # before anything is read
        if target.is_dir():
            raise UsageError(f"{target} is a directory; give -o a file name")
        if not target.absolute().parent.is_dir():
            raise UsageError(f"{target.parent} does not exist or is not a directory; create it")
        for run in runs:
            if target.resolve().is_relative_to(Path(run.checkpoints).resolve()):
                raise UsageError(f"{target} is inside the checkpoints of {run.where}; choose another file")
    facts = [gather(run, limits_of(chosen)) for run in runs]
    page = report_page(facts).encode()
    if target is None:
        storage, name = object_at(chosen.output, "the page")
        storage.replace(name, page)
    else:
        replace_file(target, page, sync="nothing")
    trouble = [text for run in facts for text in run.trouble]
    if not output.json:
        output.notices(trouble)
    written, names = chosen.output if target is None else str(target), [run.name for run in facts]
    output.result(
        {"output": written, "bytes": len(page), "runs": names, "trouble": trouble},
        f"wrote {chosen.output} ({human_bytes(len(page))}): {', '.join(names)}",
    )
    return 0


_PORT = 8321
_TOKEN = "TORCHRELAY_DASHBOARD_TOKEN"  # noqa: S105 - a variable's name
_NORM_BYTES = 64_000_000
"""Less than for a report, because a live page is rebuilt on every request."""


def _token_options(parser: argparse.ArgumentParser) -> None:
    token_options(os.environ.get(_TOKEN))(parser)


@verb(
    "serve live HTML reports of runs",
    arg("runs", "directory or URL of runs, or one run", "RUNS"),
    *address_options(_PORT),
    _token_options,
    *limits(_NORM_BYTES),
)
def dashboard(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGINT or SIGTERM, then exit immediately with code 0."""
    from torchrelay.tools.serving.serve import check_installed

    check_installed("the dashboard")
    from torchrelay.tools.report.server import DashboardServer, RemoteRuns, RunIndex
    from torchrelay.tools.serving.web import read_token

    store: RunIndex = RemoteRuns(chosen.runs) if is_remote(chosen.runs) else RunIndex(Path(chosen.runs))
    token = read_token(chosen.token, chosen.token_file)
    server = DashboardServer(store, chosen.host, chosen.port, token, limits_of(chosen))

    def ready() -> None:
        if output.json:
            output.value({"url": server.url, "runs": store.names(), "token": token is not None})
            return
        how = "?token=..." if token is not None else ""
        output.line(f"serving {store.shown} at {server.url}{how} (Ctrl-C to quit)")

    with server.socket:
        server.ready = ready
        server.run(sockets=[server.socket])
    return 0
