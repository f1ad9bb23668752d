"""`torchrelay pin` and `unpin`: epochs that retention must leave, also while a job writes there."""

from __future__ import annotations

import argparse

from torchrelay.checkpoint.format.log_state import Key, Mark
from torchrelay.checkpoint.log.writer import unpin_draft
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_epoch, add_single_writer
from torchrelay.runners.commands.marking import add_mark, marks_of, put
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import locate, parse_selector, select

_REASON = "why it is kept, a name of its own in the run"


def add_pin(add: Add) -> None:
    """Define `pin`."""
    parser = add("pin", "keep an epoch whatever retention and prune are told", pin)
    add_epoch(parser)
    parser.add_argument("name", metavar="REASON", nargs="?", help=f"{_REASON} (default: made of the epoch)")
    add_single_writer(parser)


def add_unpin(add: Add) -> None:
    """Define `unpin`."""
    parser = add("unpin", "let retention have an epoch again", unpin)
    add_epoch(parser, default="the one pinned for REASON")
    parser.add_argument("name", metavar="REASON", nargs="?", help="only this pin (default: all of the epoch)")
    add_single_writer(parser)


def pin(chosen: argparse.Namespace, output: Output) -> int:
    """Pin one epoch."""
    add_mark("pin", chosen.path, lambda key: chosen.name or _name_for(key), output, chosen.single_writer)
    return 0


def _name_for(key: Key) -> str:
    return f"epoch-{key.position}-branch-{key.branch}"


def unpin(chosen: argparse.Namespace, output: Output) -> int:
    """Take away the pins of an epoch, or the one of a name."""
    found = _pins(chosen.path, chosen.name)
    place = locate(parse_selector(chosen.path).path, single_writer=chosen.single_writer)
    for mark in found:
        put(place.storage, unpin_draft(mark.name))
    if output.json:
        output.value({"unpinned": [mark.name for mark in found]})
    for mark in found if not output.json else ():
        output.line(f"epoch {mark.target.position} is no longer pinned as {mark.name}")
    return 0


def _pins(path: str, name: str | None) -> list[Mark]:
    """The pins that are meant; UsageError where neither an epoch nor a name says it."""
    selector = parse_selector(path)
    if selector.wish is None and name is None:
        raise UsageError(
            "unpin needs an epoch or a reason: torchrelay unpin RUN@7, torchrelay unpin RUN REASON"
        )
    view = locate(selector.path).log()
    target = None if selector.wish is None else select(path).entry.key
    pins = [
        mark for mark in marks_of(view, "pin") if target in (None, mark.target) and name in (None, mark.name)
    ]
    if not pins:
        known = ", ".join(f"{mark.name} (epoch {mark.target.position})" for mark in marks_of(view, "pin"))
        raise UnknownEpochError(f"{path} has no such pin; there are: {known or 'none'}")
    return pins
