"""The run that was chosen to be trained: made, begun again, or noted to go on."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.errors import DirectoryInUseError
from torchrelay.metadata.experiments import Note, ProgramRun, RunStore, update_note
from torchrelay.runners.experiment.choosing_runs import Chosen
from torchrelay.runners.monitoring.status import standing

_WORDS = {"new": "new", "again": "from the beginning", "continue": "goes on"}


def made_run(
    store: RunStore, note: Note, chosen: Chosen, best: tuple[str, str] | None, ranks: int
) -> dict[str, str]:
    """On rank 0: make the run, or note that this start goes on with it; its path, and what to say."""
    more = ""
    if chosen.run is None:
        run = store.create(note, best, ranks)
    elif chosen.action == "again":
        found = _free(store.find(chosen.run), chosen)
        note = replace(note, message=note.message or found.note.message)
        run, aside = store.begin_again(found, note, best, ranks)
        more = f"; what it had lies in {aside}"
    else:
        run = store.find(chosen.run)
        if (
            standing(run.path).word != "running"
        ):  # else the run's log refuses this start, which changes nothing
            message = note.message or run.note.message
            run = update_note(run, launch=note.launch, limits=note.limits, message=message)
    said = f"run {run.id} in {run.path.parent}: {_WORDS[chosen.action]} ({chosen.reason}){more}"
    return {"path": str(run.path), "said": said}


def _free(run: ProgramRun, chosen: Chosen) -> ProgramRun:
    """The run, looked at again: building the program took a while. Raises DirectoryInUseError."""
    if run.note.created != chosen.created or standing(run.path).word == "running":
        raise DirectoryInUseError(f"{run.id} was begun by another process meanwhile: look at it by `status`")
    return run
