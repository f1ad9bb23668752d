"""Select the epoch that a subcommand uses and the code for it, and load it into existing objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.format.position import Selection
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.log.record import has_job
from torchrelay.errors import NoProvableEpochError, NotAllowedNowError, UnknownEpochError, UsageError
from torchrelay.jobs.blobs import is_stateful
from torchrelay.jobs.job import Job
from torchrelay.metadata.code.archive import SHORT
from torchrelay.metadata.experiments import ProgramRun
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.command_context import BaseCommand
from torchrelay.runners.programs.run_selection import choose_to_use


@dataclass(frozen=True)
class Used:
    """An epoch of a run, and the id of the code that uses it."""

    run: str
    path: str
    epoch: int
    branch: int
    code_id: str | None
    config_id: str | None
    own: bool
    """True if code and configuration are those of the run."""
    said: str = ""

    @property
    def name(self) -> str:
        """A name of exactly this epoch, also after later commits and rewinds."""
        return f"{self.epoch},branch={self.branch}"


def use(command: BaseCommand) -> dict[str, Any]:
    """On rank 0: choose run and epoch, as a dict for other ranks. Raises errors of choosing and opening."""
    wanted = command.archived or command.request.run_id
    if wanted is not None:
        run = command.store.find(wanted)
    else:
        runs = command.known()
        try:
            run = command.store.find(choose_to_use(command.identity, runs, ignore=command.request.ignore).id)
        except NotAllowedNowError as error:
            raise NotAllowedNowError(f"{error}{_what(command, command.store.find(runs[-1].id))}") from None
    said, code, config = "", run.note.code_id, run.note.config_id
    own = command.archived is not None or command.identity_of(run).same(command.identity)
    if command.archived is not None:
        said = f"runs the archived code {(code or '')[:SHORT]} of {run.id}"
    elif not own:
        code, config = command.identity.code_id, command.identity.config_id
        said = f"--ignore: runs the current code instead of that of {run.id}{_what(command, run)}"
    epoch, branch = _newest(run, command.request.epoch)
    return vars(Used(run.id, str(run.path), epoch, branch, code, config, own, said))


def _what(command: BaseCommand, run: ProgramRun) -> str:
    """Describe what changed since a run, in brackets."""
    found = command.changed(run)
    return f" (changed: {found})" if found else ""


def _newest(run: ProgramRun, wanted: str | None) -> tuple[int, int]:
    """Return the requested epoch and its branch."""
    untrained = f"{run.id} has no trained epoch yet ({standing(run.path)}): train it first"
    if wanted is None and not has_job(run.path / "checkpoints"):
        raise UsageError(untrained)
    number = int(wanted) if wanted is not None and wanted.isascii() and wanted.isdigit() else None
    try:
        opened = open_checkpoint(run.path, number if number is not None else wanted or "last")
    except (UnknownEpochError, NoProvableEpochError) as error:
        if wanted is None and isinstance(error, UnknownEpochError):
            raise UsageError(untrained) from error
        raise
    if wanted is None and opened.epoch == 0 and opened.position.boundary:
        raise UsageError(untrained)
    return opened.epoch, opened.branch


def load_what_is_there(
    job: Job, run: Path, epoch: str, resume_exclude: Sequence[str], exclude: Sequence[str]
) -> None:
    """Load an epoch into those objects of a job that it contains; raises BlobError if one does not fit.

    As in a resume, leaves of `resume_exclude` are not loaded, nor those of `exclude` that it does not have.
    New and removed blobs are not errors.
    """
    opened = open_checkpoint(run, epoch)
    known = {
        blob.name: blob.source
        for blob in job.blobs
        if is_stateful(blob.source) or isinstance(blob.source, torch.Tensor)
    }
    wanted = {name: one for name, one in known.items() if name in opened.blobs and name not in resume_exclude}
    meant = [
        one for one in resume_exclude if any(one.startswith(f"{name}.") or one[0] == "*" for name in wanted)
    ]
    absent = opened.absent(wanted, Selection(None, tuple(exclude)))
    opened.load(wanted, exclude=[*meant, *absent])
