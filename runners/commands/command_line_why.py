"""`torchrelay ckpt why`: why an epoch is not used, and what a start now would choose."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import chain

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.inspect.why import Account, Start, explain, newest_and_chosen, start_now
from torchrelay.checkpoint.log.history import History, read_history
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import StorageError, UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_epoch
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import LAST, Place, Selector, find_entry, locate, parse_selector

_WANTED = re.compile(r"(\d+(?:\+\d+)?)(?:,branch=(\d{1,9}))?", re.ASCII)
_STYLES = {"chosen": "proved", "not resumable": "quarantined"}


def add_why(add: Add) -> None:
    """Define `why`."""
    parser = add("why", "say why an epoch is not used, and what a start now would choose", why)
    add_epoch(parser, default="the newest, and all down to the one that is chosen")
    parser.add_argument(
        "epoch",
        metavar="EPOCH",
        nargs="?",
        help="the same without @, and positions inside an epoch: 7, 3+1200, 7,branch=0",
    )


def why(chosen: argparse.Namespace, output: Output) -> int:
    """Tell; returns 0, or what a start now would end with."""
    selector = parse_selector(chosen.path)
    place = locate(selector.path)
    wanted = None if chosen.epoch is None else _wanted(chosen.epoch)
    view = place.log()
    if selector.wish is not None:
        wanted = _selected(place, view, selector, chosen.epoch)
    history = read_history(place.storage, view.job_uuid or "", view.slot)
    start = start_now(place.storage, view)
    if wanted is not None:
        accounts = [explain(view, history, start, *wanted)]
    else:
        entries = list(newest_and_chosen(view, start))
        accounts = [explain(view, history, start, one.position, one.branch) for one in entries]
    failures = {account.position: list(_failures(place, account.position)) for account in accounts}
    for notice in view.notices:
        output.notice(notice)
    if output.json:
        output.value(_json(view, history, start, accounts, failures))
    else:
        _say(output, start, accounts, failures)
    return start.exit_code


def _wanted(text: str) -> tuple[Position, int | None]:
    match = _WANTED.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no epoch: write 7, 3+1200, or 7,branch=0")
    return Position.parse(match[1]), None if match[2] is None else int(match[2])


def _selected(
    place: Place, view: LogView, selector: Selector, besides: str | None
) -> tuple[Position, int | None]:
    wish = selector.wish
    if besides is not None:
        raise UsageError(f"@{selector.epoch} and {besides} both name an epoch: give one of them")
    if wish is not None and wish.epoch is not None:
        return Position(wish.epoch), wish.branch  # it need not be live: what became of it is told
    entry = find_entry(place, view, wish or LAST)
    return entry.position, entry.branch


def _failures(place: Place, position: Position) -> Iterator[str]:
    """What the run noted of saves of this epoch that failed; notes that cannot be read say nothing."""
    if place.run is None or not position.boundary:
        return
    try:
        for event in place.run.events():
            if event.get("kind") == "save failed" and event.get("epoch") == position.epoch:
                yield f"a save of it failed: {event.get('error', 'the reason was not noted')}"
    except StorageError:
        return


def _json(
    view: LogView,
    history: History,
    start: Start,
    accounts: list[Account],
    failures: dict[Position, list[str]],
) -> dict[str, object]:
    return {
        "job": view.job_name,
        "branch": view.current.id,
        "start": {
            "epoch": None if start.chosen is None else start.chosen.position.epoch,
            "step": None if start.chosen is None else start.chosen.position.step,
            "over": start.over,
            "says": start.sentence,
            "exit_code": start.exit_code,
        },
        "epochs": [{**one.json(), "failures": failures[one.position]} for one in accounts],
        "history_from_slot": history.begins,
        "notices": list(view.notices),
    }


def _say(output: Output, start: Start, accounts: list[Account], failures: dict[Position, list[str]]) -> None:
    for account in accounts:
        where = "" if account.branch is None else f" (branch {account.branch})"
        reason = account.reason.removeprefix(f"{account.standing} ")  # "abandoned by a rewind"
        line = f"epoch {account.position}{where}  {account.standing}: {reason}"
        output.line(line, _STYLES.get(account.standing, account.standing))
        told = (f"slot {one.slot}, {one.when}: {one.text}" for one in account.happened)
        for text in chain(told, failures[account.position]):
            output.line(f"  {text}")
    output.line(start.sentence)
