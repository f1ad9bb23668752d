"""`amend`: the changed code becomes that of an existing run, beside what it really ran, which stays.

For changes that do not touch what was trained: a comment, a plot, another test. Allowed in every state but
running, for code that takes the run's newest epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import DamagedError, DirectoryInUseError, RelayError, StorageError, UsageError
from torchrelay.metadata.code.archive import SHORT
from torchrelay.metadata.code.capture import captures, command, surroundings, write_capture
from torchrelay.metadata.code.snapshot import Snapshot
from torchrelay.metadata.experiments import ProgramRun, update_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.command_context import BaseScene, say
from torchrelay.runners.training.capture import Capturing

Fit = Callable[[Path, str], None]
"""Loads an epoch of a run, by its name, into what the code makes now."""


class CannotBuildError(UsageError):
    """What train builds could not be built, so nothing is known of the epoch."""


_OF_THE_CONFIGURATION = ("config", "config_files", "config_id", "overrides")


def amend(scene: BaseScene, fit: Fit) -> int:
    """Record it, and say both ids. Raises UsageError, DirectoryInUseError, StorageError.

    `fit` raises where the epoch cannot be loaded.
    """
    runs = scene.runs()
    if not runs:
        raise UsageError("there is no run to amend: train first")
    run = scene.store.find(scene.request.run_id) if scene.request.run_id else runs[-1]
    stands = standing(run.path)
    if stands.word == "running":
        raise DirectoryInUseError(f"{run.id} is running: its code can be amended when it has ended")
    old, new = run.note.code_id, scene.identity.code_id
    snapshot = scene.snapshot
    if snapshot is None or new is None:
        raise UsageError(f"{scene.title} has no source to look at (code = False): there is no code to record")
    if scene.identity.config_id != run.note.config_id:
        raise UsageError(
            f"the configuration is not that of {run.id}, and only code can be amended: train makes a new run"
        )
    if scene.identity_of(run).code_id == new:
        raise UsageError(f"nothing to amend: the code is that of {run.id}, {new[:SHORT]}")
    _check_fit(run, fit)
    attempt = _record(run, scene, snapshot)
    past = {"code_id": old, "time": round(time.time(), 3), "message": scene.request.message}
    update_note(run, code_id=new, amended=(*run.note.amended, past))
    say(
        f"{run.id} ({stands.word}): code {(old or 'none')[:SHORT]} amended to {new[:SHORT]}; "
        f"`torchrelay runs code {run.path}` has the new one, with --attempt the others (this is {attempt})"
    )
    return 0


def _check_fit(run: ProgramRun, fit: Fit) -> None:
    """Refuse code that would be of no use to `test` and `eval`; a run without an epoch takes any."""
    try:
        opened = open_checkpoint(run.path)
    except RelayError:
        return
    try:
        fit(run.path, f"{opened.epoch},branch={opened.branch}")
    except (DamagedError, StorageError, CannotBuildError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(
            f"{run.id} cannot be amended: the changed code does not take its epoch {opened.epoch} "
            f"({type(error).__name__}: {text:.500}); train makes a new run"
        ) from error


def _record(run: ProgramRun, scene: BaseScene, snapshot: Snapshot) -> int:
    """Archive the source and note it as one more start's, that trained nothing; returns its number."""
    before = captures(run.path)
    code = Capturing(RunDirectory(run.path), scene.origin.code_option, None).record_code(snapshot, say)
    attempt = before[-1]["number"] + 1 if before else 0
    same = {name: before[-1].get(name) for name in _OF_THE_CONFIGURATION} if before else {}
    content = {
        **command(),
        **surroundings(),
        **same,
        "code": code,
        "amended": True,
        "message": scene.request.message,
    }
    return int(write_capture(run.path, attempt, content).name.split(".")[1])
