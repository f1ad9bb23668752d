"""`torchrelay runs diff`: how source, configuration and surroundings of two runs differ."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from torchrelay.metadata.code.archive import Changes, FileDiff
from torchrelay.metadata.code.capture import code_id_of
from torchrelay.metadata.code.manifest import SHORT
from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.run_library import add_library
from torchrelay.runners.commands.runs_difference import Difference, Start, difference
from torchrelay.runners.monitoring.console import Output

_STYLES = {"+": "proved", "-": "damaged"}


def add_runs_diff(add: Add) -> None:
    """Define `runs diff`."""
    parser = add("diff", "show what differs between two runs: source, configuration, surroundings", diff)
    parser.add_argument(
        "a", metavar="A", help="a run directory, or the id of a run; A#2 is what its start 2 was"
    )
    parser.add_argument("b", metavar="B", help="another one, or another start of the same")
    add_library(parser)
    parser.add_argument("--stat", action="store_true", help="names and counts of lines only")


def diff(chosen: argparse.Namespace, output: Output) -> int:
    """Print differences, B's against A's."""
    with ExitStack() as stack:
        found = difference(chosen.a, chosen.b, stack, chosen.runs)
    if output.json:
        output.value(difference_json(found, stat=chosen.stat))
    else:
        say_difference(output, found, stat=chosen.stat)
    return 0


def say_difference(output: Output, found: Difference, *, stat: bool) -> None:
    """Source, configuration, surroundings, in this order; `stat` leaves lines of files out."""
    _say_code(output, found.a, found.b, found.code)
    for one in (*found.files, *found.configs):
        _say_file(output, one, stat=stat)
    for name, (before, after) in found.captured.items():
        output.line(f"{name}: {before} -> {after}")
    if not (found.code or found.configs or found.captured):
        what = "nothing else that was recorded differs" if found.code is None else "nothing recorded differs"
        output.line(what)


def _say_code(output: Output, a: Start, b: Start, found: Changes | None) -> None:
    """A line on the two codes as a whole."""
    if found is None:
        for one in (a, b):
            if one.archive is None:
                code = one.captured.get("code")
                why = code.get("why") if isinstance(code, dict) else None
                output.line(f"the source of {one.text} was not archived: {why or 'not said why'}")
    elif not found:
        output.line(f"code {_short(a)}: the same")
    else:
        counts = f"{len(found.changed)} changed, {len(found.added)} added, {len(found.removed)} removed"
        output.line(f"code {_short(a)} -> {_short(b)}: {counts}")


def _short(start: Start) -> str:
    return start.archive.code_id[:SHORT] if start.archive is not None else "none"


def _say_file(output: Output, one: FileDiff, *, stat: bool) -> None:
    """A file: its lines, or with `stat` how many."""
    came, went = one.counts
    if stat or one.lines is None:
        how = "no text" if one.lines is None else f"+{came} -{went}"
        output.line(f"  {one.name}  {how}")
        return
    for line in one.lines:
        output.line(line, _STYLES.get(line[:1]), tabs=True)


def difference_json(found: Difference, *, stat: bool) -> dict[str, Any]:
    """As the object of `runs diff --json`."""

    def of(one: FileDiff) -> dict[str, Any]:
        came, went = one.counts
        text = None if stat or one.lines is None else "\n".join(one.lines)
        return {"name": one.name, "added_lines": came, "removed_lines": went, "diff": text}

    a, b, code = found.a, found.b, found.code
    told = None if code is None else {"added": code.added, "changed": code.changed, "removed": code.removed}
    return {
        "a": {"run": a.text, "attempt": a.captured["number"], "code_id": code_id_of(a.captured)},
        "b": {"run": b.text, "attempt": b.captured["number"], "code_id": code_id_of(b.captured)},
        "code": told,
        "files": [of(one) for one in found.files],
        "config": [of(one) for one in found.configs],
        "captured": {name: {"a": before, "b": after} for name, (before, after) in found.captured.items()},
    }
