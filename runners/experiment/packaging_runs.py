"""`torchrelay package RUN@best --out FILE`: a run by its directory, packaged by its archived code."""

from __future__ import annotations

from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.metadata.experiment.note import read_note
from torchrelay.metadata.experiment.run_store import ProgramRun
from torchrelay.runners.commands.command_line_place import existing_directory, locate
from torchrelay.runners.commands.selector import parse_selector
from torchrelay.runners.experiment.archived import perform_archived
from torchrelay.runners.experiment.request import Request


def package_run(target: str, request: Request) -> int | None:
    """Package the run that a text means, in a process of its own; None where it means no run directory.

    Raises UsageError for a run whose model only Python can make, and for options that are for programs.
    """
    selector = parse_selector(target)
    path = Path(selector.path).absolute()
    if not path.is_dir():
        if selector.wish is not None:
            existing_directory(selector.path)
        return None
    note = read_note(path)
    if note is None:
        locate(selector.path)
        raise UsageError(
            f"{path} is no run of a program, so nobody knows how its model is made: "
            f"torchrelay.save(file, model, inputs, run={selector.path!r}) packages it in Python"
        )
    if request.run_id is not None or request.ignore or (selector.wish and request.epoch is not None):
        raise UsageError(f"{target} says which run and epoch: leave --run, --ignore and --epoch out")
    epoch = request.epoch if selector.wish is None else selector.epoch
    return perform_archived(ProgramRun(path, note), request, epoch)
