"""What a run notes about itself, made again from its log and its newest epoch, as far as that tells."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.inspect.inventory import Finding
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import DamagedError
from torchrelay.metadata.run_directory import FORMAT, RunDirectory
from torchrelay.runners.remote_runs.resolve import Place

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
