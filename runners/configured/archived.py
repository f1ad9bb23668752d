"""`--run ID` of a configuration: the archived source and configuration of a run, in a process of its own.

Classes are those of the archive, unpacked; data lie where they lay, and results go where they went.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.experiments import ProgramRun
from torchrelay.runners.configured.scene import ConfiguredScene
from torchrelay.runners.experiment.archived_process import RESOLVED, captured_code, environment_of

SOURCE = "TORCHRELAY_ARCHIVED_SOURCE"
"""Tells that process where the archive is unpacked; taken out of its environment at once."""


def run_archived(scene: ConfiguredScene) -> int | None:
    """Run the verb by the archived code and return its exit code; None where all is as it was.

    Raises UsageError for a run whose source or configuration was not archived.
    """
    run = scene.store.find(scene.request.run_id or "")
    if scene.request.overrides:
        raise UsageError("--run has the configuration of its run: leave -o out")
    captured = captured_code(run)
    folder, workspace = captured.get("config"), (captured["code"].get("roots") or {}).get("")
    if not (isinstance(folder, str) and isinstance(workspace, str)):
        raise UsageError(f"the configuration of {run.id} was not recorded, so it cannot be run")
    if scene.identity_of(run).same(scene.identity):
        return None
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        command = [
            sys.executable, "-m", "torchrelay", scene.request.verb, *scene.request.paths,
            "-m", str(run.path / folder / RESOLVED), "-o", f"workspace={workspace!r}",
            *_options(scene, run),
        ]  # fmt: skip
        environment: dict[str, Any] = environment_of(run, captured["code"], source)
        return subprocess.run(  # noqa: S603 - our own words
            command, env={**environment, SOURCE: str(source)}, check=False
        ).returncode


def source_told() -> Path | None:
    """Where the archived source lies that this process is to run."""
    text = os.environ.pop(SOURCE, None)
    return None if text is None else Path(text)


def _options(scene: ConfiguredScene, run: ProgramRun) -> list[str]:
    request = scene.request
    words = ["--runs", str(run.path.parent)]
    words += ["--epoch", request.epoch] if request.epoch is not None else []
    return words + [option for option, on in (("--retest", request.retest), ("--json", request.json)) if on]
