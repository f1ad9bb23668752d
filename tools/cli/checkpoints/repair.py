"""`torchrelay ckpt repair`: puts a directory of checkpoints in order, and what a run notes about itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.inspect.repair import Finding, Inventory, take_inventory
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import DamagedError, StorageError
from torchrelay.metadata.run_directory import FORMAT, RunDirectory
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import Place, locate
from torchrelay.tools.cli.arguments import Add, add_place, add_single_writer

REASON = "made again by repair: how the run ended is not known"


def lost_notes(place: Place, view: LogView | None) -> tuple[Finding, ...]:
    """`run.json` and `status.json`, where they are missing or damaged and the log is there."""
    if place.run is None or place.run.url is not None or view is None or view.slot < 0:
        return ()
    found: list[Finding] = []
    for name, read in (("run.json", place.run.identity), ("status.json", place.run.status)):
        try:
            reason = "" if read() else "is missing"
        except DamagedError as error:
            reason = str(error)
        if reason:
            found.append(Finding("mend", "note", f"../{name}", f"{reason}; the log tells what it needs"))
    return tuple(found)


def write_notes(place: Place, view: LogView | None, notes: tuple[Finding, ...]) -> None:
    """Write these anew. The times, the command and which parts of the end were done are lost."""
    if place.run is None or view is None:
        return
    newest = view.newest(boundary=True)
    manifest: Manifest | None = None
    if newest is not None:
        with suppress(OSError):
            manifest = codec.read(place.storage, newest)
    paths = {one.path for one in notes}
    if "../run.json" in paths:
        place.run.write_identity(_identity(place.run, view, manifest))
    if "../status.json" in paths:
        epoch = None if newest is None else newest.position.epoch
        place.run.write_status("STOPPED", epoch=epoch, generation=view.generation, reason=REASON)


def _identity(run: RunDirectory, view: LogView, manifest: Manifest | None) -> dict[str, Any]:
    """The run's id is in its epochs; today's program says again what "best" means."""
    known = manifest.facts.run_id if manifest is not None else None
    return {
        "format": FORMAT,
        "uuid": known or view.job_uuid,
        "job": view.job_name or run.name,
        "created": round((run.path / "checkpoints" / slot_path(0)).stat().st_mtime, 3),
        "best": None,
        "world_size": None if manifest is None else len(manifest.world.nodes),
        "command": [],
        "python": "",
    }


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
