"""`torchrelay tag`: names epochs, lists the names and takes them away, also while a job writes there."""

from __future__ import annotations

import argparse

from torchrelay.checkpoint.format.log_state import Mark
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import tag_draft
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_epoch, add_single_writer
from torchrelay.runners.commands.marking import add_mark, mark_json, marks_of, put, without_epoch
from torchrelay.runners.monitoring.console import Output

_COLUMNS = ("kind", "name", "epoch", "branch")


def add_tag(add: Add) -> None:
    """Define `tag`."""
    parser = add("tag", "name an epoch, which is then kept; without a name list tags and pins", tag)
    add_epoch(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the name; one that is there is moved")
    parser.add_argument("--delete", action="store_true", help="take the name away (RUN NAME)")
    add_single_writer(parser)


def tag(chosen: argparse.Namespace, output: Output) -> int:
    """List, name or take a name away."""
    if chosen.delete:
        return _delete(chosen, output)
    if chosen.name is None:
        return _list(chosen, output)
    add_mark("tag", chosen.path, lambda _: str(chosen.name), output, chosen.single_writer)
    return 0


def _delete(chosen: argparse.Namespace, output: Output) -> int:
    if chosen.name is None:
        raise UsageError("tag --delete needs the name: torchrelay tag --delete RUN NAME")
    place = without_epoch(chosen.path, "tag --delete", chosen.single_writer)
    view = place.log()
    if view.tagged(chosen.name) is None:
        known = ", ".join(mark.name for mark in marks_of(view, "tag")) or "none"
        raise UnknownEpochError(f"there is no tag {chosen.name!r:.80} in {place.where}; there are: {known}")
    put(place.storage, tag_draft(chosen.name, None))
    if output.json:
        output.value({"deleted": [chosen.name]})
    else:
        output.line(f"tag {chosen.name} is deleted")
    return 0


def _list(chosen: argparse.Namespace, output: Output) -> int:
    place = without_epoch(chosen.path, "tag without a name lists all")
    view = place.log()
    for notice in view.notices:
        output.notice(notice)
    if output.json:
        output.value({"marks": [mark_json(mark) for mark in _marks(view)], "notices": list(view.notices)})
    elif view.marks:
        output.table(_COLUMNS, _rows(view))
    else:
        output.line(f"no epoch of {place.where} has a tag or a pin")
    return 0


def _rows(view: LogView) -> list[tuple[str, ...]]:
    return [
        (mark.kind, mark.name, str(mark.target.position), str(mark.target.branch)) for mark in _marks(view)
    ]


def _marks(view: LogView) -> list[Mark]:
    return [*marks_of(view, "tag"), *marks_of(view, "pin")]
