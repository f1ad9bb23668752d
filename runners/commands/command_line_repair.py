"""`torchrelay ckpt repair`: puts a directory of checkpoints in order, and what a run notes about itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchrelay.checkpoint.inspect.inventory import Finding, Inventory, take_inventory
from torchrelay.errors import StorageError
from torchrelay.runners.commands.command_line_arguments import Add, add_place, add_single_writer
from torchrelay.runners.commands.command_line_run_notes import lost_notes, write_notes
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import locate

_WORDS = {"mend": "to mend", "delete": "orphan", "keep": "left alone"}


def add_repair(add: Add) -> None:
    """Define `repair`."""
    parser = add(
        "repair",
        "make again what follows from the log, finish deletions, list what no record refers to",
        repair,
    )
    add_place(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument(
        "--delete-orphans", action="store_true", help="delete what no record refers to; foreign files stay"
    )
    add_single_writer(parser)


def repair(chosen: argparse.Namespace, output: Output) -> int:
    """Mend and tell; returns 0, 4 where a job writes there, 5 while something that epochs need is lost."""
    place = locate(chosen.path, single_writer=chosen.single_writer)
    if chosen.dry_run:
        found = take_inventory(place.storage)
        notes = lost_notes(place, found.view)
        return _tell(output, found, notes, (), delete=chosen.delete_orphans)
    from torchrelay.checkpoint.inspect.repair import repair as mend

    repaired = mend(place.storage, delete=chosen.delete_orphans)
    notes = lost_notes(place, repaired.after.view)
    write_notes(place, repaired.after.view, notes)
    return _tell(output, repaired.after, (), (*repaired.done, *notes), delete=False)


def _tell(
    output: Output, left: Inventory, notes: Sequence[Finding], done: Sequence[Finding], *, delete: bool
) -> int:
    findings = (*left.findings, *notes)
    bad = [one for one in findings if one.kind in ("lost base", "lost epoch")]
    if output.json:
        output.value({"done": [one.json() for one in done], "left": [one.json() for one in findings]})
        return StorageError.exit_code if bad else 0
    for one in done:
        output.line(f"{'deleted' if one.does == 'delete' else 'mended'}  {one.kind}  {one.path}: {one.text}")
    for one in findings:
        word = "would be deleted" if delete and one.does == "delete" else _WORDS[one.does]
        output.line(f"{word}  {one.kind}  {one.path}: {one.text}")
    if not done and not findings:
        output.line("all is in order; whether the epochs are whole, `torchrelay ckpt verify` tells")
    elif any(one.does == "delete" for one in findings) and not delete:
        output.line("--delete-orphans deletes the orphans")
    return StorageError.exit_code if bad else 0
