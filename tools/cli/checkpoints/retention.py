"""`torchrelay ckpt prune|tag|pin`: delete epochs, name them, or keep them."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.coordinator.retention import Loss, plan_pruning, prune
from torchrelay.checkpoint.format.position import Key, TagOrPin
from torchrelay.checkpoint.log.chain import RecordDraft
from torchrelay.checkpoint.log.retention import KEEP_ALL, Best, Keeping
from torchrelay.checkpoint.log.view import LogView, ranges
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft, tag_draft, unpin_draft
from torchrelay.checkpoint.storage.base import SingleWriter, Storage, check_exclusion
from torchrelay.errors import DirectoryInUseError, UnknownEpochError, UsageError
from torchrelay.runners.monitoring.console import Output, arg, flag, verb
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import RunLocation, locate, parse_selector, select
from torchrelay.tools.cli.arguments import PLACE, SINGLE_WRITER, run_epoch, whole_number

_DRAFTS = {"tag": tag_draft, "pin": pin_draft}
_DONE = {"tag": "is tagged", "pin": "is pinned as"}
_PATIENCE_SECS = 10.0
"""How long `@last` is selected again if a running job's retention deletes the selected epoch."""


def marks_of(view: LogView, kind: str) -> list[TagOrPin]:
    """Return the marks of a kind, sorted by name."""
    return sorted((mark for mark in view.state.marks if mark.kind == kind), key=lambda mark: mark.name)


def mark_json(mark: TagOrPin) -> dict[str, Any]:
    """Return a mark as an object of `--json`."""
    position = mark.target.position
    where = {"epoch": position.epoch, "step": position.step, "branch": mark.target.branch}
    return {"kind": mark.kind, "name": mark.name, **where}


def add_mark(
    kind: str, text: str, name_of: Callable[[Key], str], output: Output, single_writer: SingleWriter
) -> None:
    """Mark the epoch selected by `text` and report it, also if an existing mark moves.

    It is selected again if retention deleted it meanwhile, unless the epoch was named.
    """
    wish = parse_selector(text).wish
    end = time.monotonic() + (0.0 if wish is not None and wish.explicit else _PATIENCE_SECS)
    while True:
        selected = select(text, single_writer=single_writer)
        key = selected.entry.key
        name = name_of(key)
        try:
            put(selected.place.storage, _DRAFTS[kind](name, key))
            break
        except UnknownEpochError:
            if time.monotonic() >= end:
                raise
    before = next((mark for mark in marks_of(selected.view, kind) if mark.name == name), None)
    moved = before if before is not None and before.target != key else None
    was = f" (it was epoch {moved.target.position})" if moved else ""
    output.result(
        {**mark_json(TagOrPin(kind, name, key)), "moved_from": mark_json(moved) if moved else None},
        f"epoch {key.position} {_DONE[kind]} {name}{was}",
    )


def put(storage: Storage, draft: RecordDraft) -> None:
    """Append a record without owning the log; UsageError if the storage cannot exclude other writers."""
    check_exclusion(storage)
    append_as_guest(storage, draft)


def without_epoch(text: str, what: str, single_writer: SingleWriter = None) -> RunLocation:
    """Locate a run; raises UsageError if the text names an epoch, with `what` as the reason."""
    selector = parse_selector(text)
    if selector.wish is not None:
        raise UsageError(f"{text}: {what}; give {selector.path} without an epoch")
    return locate(selector.path, single_writer=single_writer)


_BEST = re.compile(r"(?P<metric>.+?):(?P<mode>max|min)(?::(?P<count>[1-9][0-9]{0,7}))?", re.DOTALL | re.ASCII)
_COLUMNS = ("epoch", "branch", "deleted", "bytes", "directory")


def _best(text: str) -> Best:
    match = _BEST.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"invalid value {text!r:.80}: expected METRIC:max or METRIC:min, optionally with a count, "
            "as in val/acc:max:3"
        )
    return Best(match["metric"], match["mode"], int(match["count"] or 1))


@verb(
    "delete epochs by retention rules; tagged and pinned epochs are kept",
    PLACE,
    arg("--keep-last", "keep the newest N epochs", "N", type=whole_number(1)),
    arg(
        "--keep-best",
        "keep the best epoch by a metric, or the N best: val/acc:max, val/loss:min:3",
        "METRIC:MODE[:N]",
        type=_best,
    ),
    arg("--keep-every --every", "keep epochs whose number is a multiple of N", "N", type=whole_number(1)),
    arg(
        "--keep-optimizer-last",
        "keep optimizers only of the newest N kept epochs; older ones load but cannot resume",
        "N",
        type=whole_number(1),
    ),
    arg(
        "--epoch",
        "delete only this epoch; repeatable",
        "N",
        type=whole_number(0),
        action="append",
        default=[],
    ),
    flag("--dry-run", "only print what would be deleted"),
    SINGLE_WRITER,
)
def run_prune(chosen: argparse.Namespace, output: Output) -> int:
    """Print and delete the epochs; `--dry-run` only prints. Raises DirectoryInUseError if a job writes."""
    keeping = Keeping(chosen.keep_last, chosen.keep_every, chosen.keep_optimizer_last, chosen.keep_best)
    if keeping != KEEP_ALL and chosen.epoch:
        raise UsageError("--epoch names epochs to delete and cannot be combined with --keep rules")
    if chosen.epoch:
        keeping = Keeping(without=tuple(sorted(set(chosen.epoch))))
    elif keeping == KEEP_ALL:
        raise UsageError(
            "prune needs a rule: --keep-last N, --keep-best METRIC:MODE, --keep-every N, "
            "--keep-optimizer-last N or --epoch N"
        )
    place = without_epoch(chosen.path, "prune selects epochs by its options", chosen.single_writer)
    if chosen.dry_run:
        pruned = plan_pruning(place.storage, place.log(), keeping)
    else:
        try:
            with output.works():
                pruned = prune(place.storage, keeping)
        except DirectoryInUseError as error:
            raise type(error)(
                f"{error}. A running job deletes epochs itself: JobRunner(keep_last=...)"
            ) from None
    notices = [*pruned.before.notices, *pruned.doubts]
    output.notices(notices)
    if output.json:
        kept = [
            {**vars(one.position), "branch": one.branch, "resumable": one.resumable}
            for one in pruned.after.entries
        ]
        gone = [_loss_json(loss) for loss in pruned.losses]
        found = {"dry_run": chosen.dry_run, "bytes": pruned.nbytes, "gone": gone, "kept": kept}
        output.value({**found, "notices": notices})
        return 0
    if pruned.losses:
        output.table(_COLUMNS, [_cells(loss) for loss in pruned.losses], spare=("directory",))
    whole = [entry.position.epoch for entry in pruned.after.line() if entry.position.boundary]
    output.line(f"kept: {ranges(whole) or 'none'}")
    freed = f"{human_bytes(pruned.nbytes)} {'would be freed (dry run)' if chosen.dry_run else 'freed'}"
    output.line(freed if pruned.losses else "nothing to delete")
    return 0


def _cells(loss: Loss) -> tuple[str, ...]:
    what = "everything" if loss.groups is None else f"files of {', '.join(loss.groups)}"
    entry = loss.entry
    return (
        "-" if entry is None else str(entry.position),
        "-" if entry is None else str(entry.branch),
        f"{what}, left by an earlier deletion" if entry is None else what,
        human_bytes(loss.nbytes),
        loss.retirement.attempt_name,
    )


def _loss_json(loss: Loss) -> dict[str, Any]:
    """Return a loss as JSON; the epoch is None if only files without a record were left."""
    entry = loss.entry
    return {
        "epoch": None if entry is None else entry.position.epoch,
        "step": None if entry is None else entry.position.step,
        "branch": None if entry is None else entry.branch,
        "try": loss.retirement.attempt_name,
        "groups": None if loss.groups is None else list(loss.groups),
        "bytes": loss.nbytes,
    }


@verb(
    "name an epoch and keep it; without a name, list tags and pins",
    run_epoch(),
    arg("name", "name of the tag; an existing tag moves", "NAME", nargs="?"),
    flag("--delete", "delete the tag (RUN NAME)"),
    SINGLE_WRITER,
)
def tag(chosen: argparse.Namespace, output: Output) -> int:
    """List, add or delete tags."""
    if chosen.delete:
        return _delete(chosen, output)
    if chosen.name is None:
        return _list(chosen, output)
    add_mark("tag", chosen.path, lambda _: str(chosen.name), output, chosen.single_writer)
    return 0


def _delete(chosen: argparse.Namespace, output: Output) -> int:
    if chosen.name is None:
        raise UsageError("tag --delete needs a name: torchrelay ckpt tag --delete RUN NAME")
    place = without_epoch(chosen.path, "tag --delete", chosen.single_writer)
    view = place.log()
    if view.tagged(chosen.name) is None:
        known = ", ".join(mark.name for mark in marks_of(view, "tag")) or "none"
        raise UnknownEpochError(f"{place.where} has no tag {chosen.name!r:.80}; known are: {known}")
    put(place.storage, tag_draft(chosen.name, None))
    output.result({"deleted": [chosen.name]}, f"tag {chosen.name} is deleted")
    return 0


def _list(chosen: argparse.Namespace, output: Output) -> int:
    place = without_epoch(chosen.path, "tag without a name lists all tags")
    view = place.log()
    marks = [*marks_of(view, "tag"), *marks_of(view, "pin")]
    output.notices(view.notices)
    if output.json:
        output.value({"marks": list(map(mark_json, marks)), "notices": list(view.notices)})
    elif marks:
        rows = [(one.kind, one.name, str(one.target.position), str(one.target.branch)) for one in marks]
        output.table(("kind", "name", "epoch", "branch"), rows)
    else:
        output.line(f"{place.where} has no tags or pins")
    return 0


@verb(
    "keep an epoch from retention and prune",
    run_epoch(),
    arg("name", "reason, unique in the run (default: made from the epoch)", "REASON", nargs="?"),
    flag("--delete", "delete a pin, or all pins of the epoch"),
    SINGLE_WRITER,
)
def pin(chosen: argparse.Namespace, output: Output) -> int:
    """Pin one epoch; or delete the pins of an epoch, or the pin with a name."""
    if not chosen.delete:
        add_mark(
            "pin",
            chosen.path,
            lambda key: chosen.name or f"epoch-{key.position}-branch-{key.branch}",
            output,
            chosen.single_writer,
        )
        return 0
    selector, name = parse_selector(chosen.path), chosen.name
    if selector.wish is None and name is None:
        raise UsageError("pin --delete needs an epoch or a reason: torchrelay ckpt pin --delete RUN@7")
    place = locate(selector.path, single_writer=chosen.single_writer)
    pins = marks_of(place.log(), "pin")
    target = None if selector.wish is None else select(chosen.path).entry.key
    found = [mark for mark in pins if target in (None, mark.target) and name in (None, mark.name)]
    if not found:
        known = ", ".join(f"{mark.name} (epoch {mark.target.position})" for mark in pins)
        raise UnknownEpochError(f"{chosen.path} has no such pin; known are: {known or 'none'}")
    for mark in found:
        put(place.storage, unpin_draft(mark.name))
    gone = (f"epoch {mark.target.position} is no longer pinned as {mark.name}" for mark in found)
    output.result({"unpinned": [mark.name for mark in found]}, gone)
    return 0
