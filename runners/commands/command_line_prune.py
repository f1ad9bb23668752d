"""`torchrelay prune`: deletes the epochs of a run that no rule keeps."""

from __future__ import annotations

import argparse
import re
from typing import Any

from torchrelay.checkpoint.coordinator.pruning import Loss, Pruned, plan_pruning, prune
from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.log.retention import KEEP_ALL, Best, Keeping
from torchrelay.checkpoint.log.view import ranges
from torchrelay.errors import DirectoryInUseError, UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_place, add_single_writer, whole_number
from torchrelay.runners.commands.marking import without_epoch
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes

_BEST = re.compile(r"(?P<metric>.+?):(?P<mode>max|min)(?::(?P<count>[1-9][0-9]{0,7}))?", re.DOTALL | re.ASCII)
_COLUMNS = ("epoch", "branch", "goes", "bytes", "try")


def add_prune(add: Add) -> None:
    """Define `prune`."""
    parser = add(
        "prune", "delete the epochs that no rule keeps, or those named; marked ones always stay", run_prune
    )
    add_place(parser)
    parser.add_argument("--keep-last", type=whole_number(1), metavar="N", help="the newest N epochs")
    parser.add_argument(
        "--keep-best",
        type=_best,
        metavar="METRIC:MODE[:N]",
        help="the best epoch by a metric, or the N best: val/acc:max, val/loss:min:3",
    )
    parser.add_argument(
        "--keep-every",
        "--every",
        type=whole_number(1),
        metavar="N",
        help="epochs whose number is a multiple of N",
    )
    parser.add_argument(
        "--keep-optimizer-last",
        type=whole_number(1),
        metavar="N",
        help="of what is kept only the newest N keep their optimizer: older ones load, but resume no more",
    )
    parser.add_argument(
        "--epoch", type=whole_number(0), metavar="N", action="append", default=[],
        help="only this epoch goes, and nothing else; may be given again",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    add_single_writer(parser)


def run_prune(chosen: argparse.Namespace, output: Output) -> int:
    """Tell what goes, and delete it unless that was only asked; 4 where a job writes there."""
    keeping = Keeping(chosen.keep_last, chosen.keep_every, chosen.keep_optimizer_last, chosen.keep_best)
    if keeping != KEEP_ALL and chosen.epoch:
        raise UsageError("--epoch says what goes, the other rules say what stays: give one of them")
    if chosen.epoch:
        keeping = Keeping(without=tuple(sorted(set(chosen.epoch))))
    elif keeping == KEEP_ALL:
        raise UsageError(
            "prune needs to know what to keep: --keep-last N, --keep-best METRIC:MODE, --keep-every N, or "
            "--keep-optimizer-last N; or what goes: --epoch N; --dry-run shows what would go"
        )
    place = without_epoch(chosen.path, "prune has rules of its own", chosen.single_writer)
    if chosen.dry_run:
        pruned = plan_pruning(place.storage, place.log(), keeping)
    else:
        try:
            pruned = prune(place.storage, keeping)
        except DirectoryInUseError as error:
            raise type(error)(f"{error}. A running job prunes by itself: JobRunner(keep_last=...)") from None
    for said in (*pruned.before.notices, *pruned.doubts):
        output.notice(said)
    if output.json:
        output.value(_json(pruned, dry_run=chosen.dry_run))
    else:
        _say(output, pruned, dry_run=chosen.dry_run)
    return 0


def _say(output: Output, pruned: Pruned, *, dry_run: bool) -> None:
    if pruned.losses:
        output.table(_COLUMNS, [_cells(loss) for loss in pruned.losses], spare=("try",))
    kept = [entry.position.epoch for entry in pruned.after.line() if entry.position.boundary]
    output.line(f"kept: {ranges(kept) or 'none'}")
    if not pruned.losses:
        output.line("nothing goes")
    else:
        output.line(f"{human_bytes(pruned.nbytes)} {'would be freed (dry run)' if dry_run else 'freed'}")


def _cells(loss: Loss) -> tuple[str, ...]:
    what = "all of it" if loss.groups is None else f"its files of {', '.join(loss.groups)}"
    entry = loss.entry
    return (
        "-" if entry is None else str(entry.position),
        "-" if entry is None else str(entry.branch),
        f"{what}, left of an earlier deletion" if entry is None else what,
        human_bytes(loss.nbytes),
        loss.retirement.try_name,
    )


def _json(pruned: Pruned, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "bytes": pruned.nbytes,
        "gone": [_loss_json(loss) for loss in pruned.losses],
        "kept": [
            {**_where(entry.position), "branch": entry.branch, "resumable": entry.resumable}
            for entry in pruned.after.entries
        ],
        "notices": [*pruned.before.notices, *pruned.doubts],
    }


def _loss_json(loss: Loss) -> dict[str, Any]:
    """An epoch of None: its record is gone already, only files were left."""
    entry = loss.entry
    where = {"epoch": None, "step": None} if entry is None else _where(entry.position)
    return {
        **where,
        "branch": None if entry is None else entry.branch,
        "try": loss.retirement.try_name,
        "groups": None if loss.groups is None else list(loss.groups),
        "bytes": loss.nbytes,
    }


def _where(position: Position) -> dict[str, int]:
    return {"epoch": position.epoch, "step": position.step}


def _best(text: str) -> Best:
    match = _BEST.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no metric and direction: write METRIC:max or METRIC:min, and perhaps how many, "
            "as in val/acc:max:3"
        )
    return Best(match["metric"], match["mode"], int(match["count"] or 1))
