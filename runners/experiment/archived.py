"""`--run ID`: the archived code of a run, in a process of its own, on the unpacked archive."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.capture import captures, code_id_of
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.extraction import unpack_source
from torchrelay.metadata.experiment.run_store import ProgramRun
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.experiment.scene import Scene

MARK = "TORCHRELAY_ARCHIVED"
"""Tells the process on the archive whose run it works for; taken out of its environment at once."""
RESOLVED = "resolved.yaml"


def run_archived(scene: Scene) -> int | None:
    """Run the verb by the archived code and return its exit code; None where the code is today's.

    Raises UsageError for a run whose source was not archived.
    """
    run = scene.store.find(scene.request.run_id or "")
    if scene.request.config is not None:
        raise UsageError("--run has the configuration of its run: leave -m out")
    captured = captured_of(run)
    if run.note.identity.same(scene.identity):
        return None
    target = f"{scene.program.__module__}:{scene.program.__qualname__}"
    return _perform(run, scene.request, scene.request.epoch, captured, target)


def perform_archived(run: ProgramRun, request: Request, epoch: str | None) -> int:
    """The same for a run by its directory alone; raises UsageError where its program was no script."""
    captured = captured_of(run)
    if not isinstance(captured["code"].get("script"), str):
        raise UsageError(
            f"the program of {run.id} was no script: name it, torchrelay {request.verb} module:Class "
            f"--run {run.id}"
        )
    return _perform(run, request, epoch, captured, "")


def _perform(
    run: ProgramRun, request: Request, epoch: str | None, captured: Mapping[str, Any], target: str
) -> int:
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        command = [
            sys.executable,
            *_program(request, captured["code"], source, target),
            *_options(request, epoch, run, captured),
        ]
        return subprocess.run(  # noqa: S603 - the user's own program, as it was
            command, env=environment_of(run, captured["code"], source), check=False
        ).returncode


def captured_of(run: ProgramRun) -> dict[str, Any]:
    """The record of the code that the run is of now."""
    found = [one for one in captures(run.path) if code_id_of(one) == run.note.code_id]
    if run.note.code_id is None or not found:
        raise UsageError(f"the source of {run.id} was not archived, so it cannot be run")
    return found[-1]


def _program(request: Request, code: Mapping[str, Any], source: Path, target: str) -> list[str]:
    """The script in the archive, or the module by the command line."""
    script = code.get("script")
    if isinstance(script, str):
        return [str(source / script), request.verb]
    return ["-m", "torchrelay", request.verb, target]


def _options(request: Request, epoch: str | None, run: ProgramRun, captured: Mapping[str, Any]) -> list[str]:
    words = [*request.paths, "--runs", str(run.path.parent.parent)]
    words += ["--epoch", epoch] if epoch is not None else []
    words += ["--out", request.out] if request.out is not None else []
    words += ["--overwrite"] if request.overwrite else []
    words += [option for option, on in (("--retest", request.retest), ("--json", request.json)) if on]
    folder = captured.get("config")
    if isinstance(folder, str) and run.note.config_id is not None:
        words += ["-m", str(run.path / folder / RESOLVED)]
    return words


def environment_of(run: ProgramRun, code: Mapping[str, Any], source: Path) -> dict[str, str]:
    """With the archive's own folders before all others in which modules are looked for."""
    folders = code.get("import_path")
    first = [str(source / one) for one in (folders if isinstance(folders, list) else [""])]
    before = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return {
        **os.environ,
        MARK: str(run.path),
        "PYTHONPATH": os.pathsep.join([*first, *before]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
