"""`torchrelay runs ls` and `runs show`: the runs of all experiments, and one beside its predecessor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torchrelay.errors import RelayError
from torchrelay.metadata.code.manifest import SHORT
from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.command_line_runs_diff import difference_json, say_difference
from torchrelay.runners.commands.library_line import LibraryLine, library_line
from torchrelay.runners.commands.run_library import add_library, find_run, library, runs_in, shown
from torchrelay.runners.commands.runs_difference import Difference, difference
from torchrelay.runners.monitoring.console import Output, time_text
from torchrelay.runners.monitoring.status import STATES
from torchrelay.runners.remote_runs.names import is_remote, parent

_COLUMNS = ("run", "experiment", "state", "epoch", "metric", "code", "config", "comment")


def add_runs_ls(add: Add) -> None:
    """Define `runs ls`."""
    parser = add("ls", "list the runs of all experiments below a directory", ls)
    text = "the library (default: TORCHRELAY_RUNS, else runs)"
    parser.add_argument("path", metavar="RUNS", nargs="?", help=text)
    parser.add_argument("--state", choices=STATES, help="only runs that stand so")


def add_runs_show(add: Add) -> None:
    """Define `runs show`."""
    parser = add(
        "show", "say what a run is of, how it stands, and how it differs from the one before it", show
    )
    parser.add_argument("path", metavar="RUN", help="a run directory, or the id of a run, or a part of it")
    add_library(parser)
    parser.add_argument("--against", metavar="RUN", help="compare with this run instead")
    parser.add_argument("--stat", action="store_true", help="names and counts of lines only")


def ls(chosen: argparse.Namespace, output: Output) -> int:
    """A line per run, the experiments by name, their runs by age; a damaged one has its line, too."""
    root = library(chosen.path)
    lines = sorted((library_line(one, root) for one in runs_in(root)), key=_by_age)
    lines = [one for one in lines if chosen.state in (None, one.state)]
    if output.json:
        output.value({"library": shown(root), "runs": [one.json() for one in lines]})
        return 0
    if not lines:
        output.line(
            f"no run is in {shown(root)}"
            if chosen.state is None
            else f"no run in {shown(root)} is {chosen.state}"
        )
        return 0
    output.table(_COLUMNS, [_cells(one) for one in lines], spare=("config", "code", "experiment"))
    for one in lines:
        if one.problem:
            output.notice(f"{shown(one.path)}: {one.problem}")
    return 0


def show(chosen: argparse.Namespace, output: Output) -> int:
    """What a run is of and how it stands; then source and configuration against those of another."""
    root, path = library(chosen.runs), find_run(chosen.path, chosen.runs).path
    line = library_line(path, root)
    asked = chosen.against
    before = _predecessor(line) if asked is None else str(find_run(asked, chosen.runs).where)
    with ExitStack() as stack:
        found, why = _difference(before, line, stack)
        if output.json:
            against = None if found is None else difference_json(found, stat=chosen.stat)
            output.value({"run": line.json(), "against": before, "difference": against, "why": why})
            return 0
        for name, text in _facts(line):
            output.line(f"{name.ljust(10)}  {text}")
        output.line(f"against     {before or why}")
        if found is not None:
            say_difference(output, found, stat=chosen.stat)
        elif before is not None:
            output.line(why)
    return 0


def _difference(before: str | None, line: LibraryLine, stack: ExitStack) -> tuple[Difference | None, str]:
    """What differs; without it, why that cannot be told."""
    if before is None:
        return None, "no earlier run of the same experiment"
    try:
        return difference(before, shown(line.path), stack), ""
    except RelayError as error:
        return None, str(error)


def _predecessor(line: LibraryLine) -> str | None:
    """The run of the same directory that was made before this one."""
    root, url = line.path.parent, shown(line.path)
    if is_remote(url) and (above := parent(url)) is not None:
        library(above)  # brings the runs beside it
    beside = sorted((library_line(one, root) for one in runs_in(root) if one.parent == root), key=_by_age)
    earlier = [one for one in beside if _by_age(one) < _by_age(line) and one.id != line.id]
    return shown(earlier[-1].path) if earlier else None


def _by_age(line: LibraryLine) -> tuple[str, float, str]:
    return str(line.path.parent), line.created or 0.0, line.id


def _cells(line: LibraryLine) -> Sequence[str]:
    return (
        line.id,
        line.experiment or "-",
        line.why if line.state == "silent" else line.state,
        "-" if line.epoch is None else str(line.epoch),
        line.key_metric,
        (line.code_id or "-")[:SHORT],
        (line.config_id or "-")[:SHORT],
        line.message,
    )


def _facts(line: LibraryLine) -> list[tuple[str, Any]]:
    amended = "".join(f", amended from {(one or '?')[:SHORT]}" for one in line.amended)
    return [
        ("run", line.id),
        ("in", shown(line.path).rpartition("/")[0]),
        ("state", f"{line.state} ({line.why or line.problem})" if line.why or line.problem else line.state),
        ("epoch", "none" if line.epoch is None else line.epoch),
        ("metric", line.key_metric),
        ("comment", line.message or "none"),
        ("created", "not known" if line.created is None else time_text(line.created)),
        ("code", f"{(line.code_id or 'not archived')[:SHORT]}{amended}"),
        ("config", (line.config_id or "none")[:SHORT]),
    ]
