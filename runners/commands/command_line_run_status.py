"""`torchrelay status RUN`: how one run stands, wherever it lies, without the program that it is of."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError, UsageError
from torchrelay.metadata.experiments import newest_result, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.remote_runs.resolve import Place, locate


def is_run(text: str) -> bool:
    """Whether what stands for the program is a run: a URL, or a directory with the notes of one."""
    return is_remote(text) or (Path(text) / "run.json").is_file()


def run_status(text: str, chosen: argparse.Namespace, output: Output) -> int:
    """Print it; with `--check` the exit code is 1 where the same command would go on with it, else 0."""
    place = locate(text)
    if place.run is None:
        raise UsageError(f"{text} holds checkpoints but no run: torchrelay ls lists its epochs")
    stands, told = standing(place.run.path), _told(place, place.run)
    if output.json:
        output.value(told)
    else:
        why = f" ({told['why']})" if told["why"] else ""
        epoch = "no epoch saved" if told["epoch"] is None else f"newest epoch {told['epoch']}"
        message = f", {told['message']!r}" if told["message"] else ""
        output.line(f"run {told['id']}: {told['state']}{why}, {epoch}{message}")
        if told["test"] is not None:
            output.line(f"tested at epoch {told['test']['epoch']}")
    return 1 if chosen.check and not stands.over else 0


def _told(place: Place, run: RunDirectory) -> dict[str, Any]:
    stands, result, note = standing(run.path), newest_result(run.path), read_note(run.path)
    epoch = None
    with suppress(RelayError):
        newest = place.log().newest(boundary=True)
        epoch = None if newest is None else newest.position.epoch
    return {
        "id": run.name,
        "path": str(run.where),
        "state": stands.word,
        "why": stands.why,
        "epoch": epoch,
        "message": "" if note is None else note.message,
        "test": None if result is None else {"epoch": result.get("epoch"), **(result.get("metrics") or {})},
    }
