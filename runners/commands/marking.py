"""What the verbs that tag and pin share: putting one mark into the log of a run, whoever writes there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.format.log_state import Key, Mark
from torchrelay.checkpoint.log.append import Draft
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft, tag_draft
from torchrelay.checkpoint.storage.base import SingleWriter, Storage, check_exclusion
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import Place, Selected, locate, parse_selector, select

_DRAFTS = {"tag": tag_draft, "pin": pin_draft}
_DONE = {"tag": "is tagged", "pin": "is pinned as"}
_PATIENCE_SECS = 10.0
"""For so long `@last` is chosen again where a quick job's retention takes one epoch after the other."""


def marks_of(view: LogView, kind: str) -> list[Mark]:
    """The marks of a kind, by name."""
    return sorted((mark for mark in view.marks if mark.kind == kind), key=lambda mark: mark.name)


def mark_json(mark: Mark) -> dict[str, Any]:
    """A mark as an object of `--json`."""
    position = mark.target.position
    where = {"epoch": position.epoch, "step": position.step, "branch": mark.target.branch}
    return {"kind": mark.kind, "name": mark.name, **where}


def add_mark(
    kind: str, text: str, name_of: Callable[[Key], str], output: Output, single_writer: SingleWriter
) -> None:
    """Mark the epoch that a text selects and tell; a mark of that name moves, which is told, too."""
    selected = _marked(kind, text, name_of, single_writer)
    key = selected.entry.key
    name = name_of(key)
    before = next((mark for mark in marks_of(selected.view, kind) if mark.name == name), None)
    moved = before if before is not None and before.target != key else None
    if output.json:
        told = {**mark_json(Mark(kind, name, key)), "moved_from": mark_json(moved) if moved else None}
        output.value(told)
    else:
        was = f" (it was epoch {moved.target.position})" if moved else ""
        output.line(f"epoch {key.position} {_DONE[kind]} {name}{was}")


def _marked(kind: str, text: str, name_of: Callable[[Key], str], single_writer: SingleWriter) -> Selected:
    """The epoch, with the log before. One that retention took meanwhile is chosen anew unless named."""
    wish = parse_selector(text).wish
    patience = 0.0 if wish is not None and wish.explicit else _PATIENCE_SECS
    end = time.monotonic() + patience
    while True:
        selected = select(text, single_writer=single_writer)
        key = selected.entry.key
        try:
            put(selected.place.storage, _DRAFTS[kind](name_of(key), key))
        except UnknownEpochError:
            if time.monotonic() < end:
                continue
            raise
        return selected


def put(storage: Storage, draft: Draft) -> None:
    """Append a guest's record. Raises what `append_as_guest` does, UsageError where nobody could be sure."""
    check_exclusion(storage)
    append_as_guest(storage, draft)


def without_epoch(text: str, what: str, single_writer: SingleWriter = None) -> Place:
    """The place that a text names; UsageError where it names an epoch, which `what` has no use for."""
    selector = parse_selector(text)
    if selector.wish is not None:
        raise UsageError(f"{text}: {what}: give the run without an epoch, {selector.path}")
    return locate(selector.path, single_writer=single_writer)
