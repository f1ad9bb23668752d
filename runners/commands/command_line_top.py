"""`torchrelay top`: how running jobs stand, again and again on a terminal, once into a pipe."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.run_status import RunLook, look_at, runs_at
from torchrelay.runners.commands.command_line_arguments import Add, add_run
from torchrelay.runners.monitoring.console import Output, human_number
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.monitoring.text import duration, per_second
from torchrelay.runners.remote_runs.names import for_a_glance, is_remote
from torchrelay.runners.remote_runs.resolve import existing_directory

_COLUMNS = ("run", "state", "epoch", "step", "rate", "eta", "last save")
_QUIET_SECS = 150.0
"""A rank leaves a line in its log every minute, or as often as the program says."""
_METRICS = 3
_NAMED_RANKS = 8


def add_top(add: Add) -> None:
    """Define `top`."""
    parser = add("top", "watch running jobs: where they are, how quick, what was saved, what went wrong", top)
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

    from torchrelay.runners.remote_runs.mirror import mirror_of

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
            cells = [_cells(look) for look in looks]
            live.update(output.renderable(_COLUMNS, cells, [*trouble, *_all_notes(looks)]), refresh=True)
            time.sleep(every_secs)


def _all_notes(looks: Sequence[RunLook]) -> list[str]:
    clock = time.strftime("%H:%M:%S UTC", time.gmtime())
    notes = [note for look in looks for note in _notes(look)]
    return [*notes, f"{clock}, {len(looks)} runs; Ctrl-C ends"]


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
    slowest = _slowest(look)
    why = look.why if look.stands == "interrupted" and look.why != look.unreadable else ""
    notes = [why, _values(look.metrics), slowest, _quiet(look), look.doing, look.unreadable, warned]
    found = " | ".join(note for note in notes if note)
    return [f"{look.name}: {found}"] if found else []


def _slowest(look: RunLook) -> str:
    """The node that the newest save waited for; of a single rank there is nobody who waits."""
    if look.slowest is None or len(look.ranks) == 1:
        return ""
    return f"slowest node {look.slowest[0]} {look.slowest[1]:.1f}s"


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
