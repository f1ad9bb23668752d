"""`torchrelay runs ls|show|code`: the runs of all experiments, one beside its predecessor, its source."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError
from torchrelay.metadata.code.archive import SHORT, Manifest, open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.runners.monitoring.console import Output, time_text
from torchrelay.runners.monitoring.status import STATES
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.names import is_remote, parent
from torchrelay.tools.cli.arguments import Add
from torchrelay.tools.cli.runs.compare import Difference, difference, difference_json, say_difference
from torchrelay.tools.cli.runs.run_library import (
    LibraryLine,
    add_library,
    find_run,
    library,
    library_line,
    runs_in,
    shown,
)

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


def add_runs_code(add: Add) -> None:
    """Define `runs code`."""
    parser = add("code", "write the archived source of a run to a directory, verified", code)
    parser.add_argument("path", metavar="RUN", help="a run directory, or the id of a run")
    add_library(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="a new directory; without it the files are listed"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="what start N ran (default: the newest)")
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def code(chosen: argparse.Namespace, output: Output) -> int:
    """Extract, or list, what a start of the run ran."""
    run = find_run(chosen.path, chosen.runs).path
    captured = capture_with_code(run, chosen.attempt)
    with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
        if chosen.output is not None:
            unpack_source(archive, Path(chosen.output), force=chosen.force)
        manifest = archive.manifest
    if output.json:
        output.value({"output": chosen.output, **_json(captured, manifest)})
        return 0
    which = f"code {archive.code_id[:SHORT]} of attempt {captured['number']}"
    count = len(manifest.files) + len(manifest.links)
    size = human_bytes(manifest.nbytes)
    if chosen.output is not None:
        output.line(f"{which}: {count} files ({size}) in {chosen.output}")
        return 0
    output.table(
        ("bytes", "file"),
        [
            *((str(file.nbytes), name) for name, file in manifest.files.items()),
            *(("link", f"{name} -> {target}") for name, target in manifest.links.items()),
        ],
    )
    output.notice(f"{which}: {count} files ({size}); -o DIR writes them")
    return 0


def _json(captured: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    code = captured["code"]
    return {
        "code_id": code["id"],
        "attempt": captured["number"],
        "script": code.get("script"),
        "git": code.get("git"),
        "files": {
            name: {"sha256": file.sha256, "bytes": file.nbytes} for name, file in manifest.files.items()
        },
        "links": dict(manifest.links),
        "left_out": code.get("left_out", []),
    }
