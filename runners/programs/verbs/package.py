"""`package --out FILE`: the model of a run, in one file that needs none of the code that trained it."""

from __future__ import annotations

from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.models.package.reader import Package
from torchrelay.runners.programs.command_context import say
from torchrelay.runners.programs.epoch_selection import Used, use
from torchrelay.runners.programs.program import Scene
from torchrelay.runners.session.local import current_or_new_session


def package(scene: Scene) -> int:
    """Load the weights of the epoch that is meant, and write the package; what it lacks is said."""
    request = scene.request
    if request.out is None:
        raise UsageError("package writes a file: name it with --out FILE")
    with current_or_new_session():
        used = Used(**use(scene))
        if used.said:
            say(used.said)
        program = scene.made()
        set_seed(program.seed)
        program.load_weights(used.path, used.name)
        made = program.package(request.out, metadata=_metadata(scene, used), overwrite=request.overwrite)
        say(f"epoch {used.epoch} of {used.run}: {made.where}{lacking(made)}")
    return 0


def _metadata(scene: Scene, used: Used) -> dict[str, Any]:
    found = {"run": used.run, "epoch": used.epoch, "code_id": used.code_id, "program": scene.origin.name}
    return {key: value for key, value in found.items() if value is not None}


def lacking(made: Package) -> str:
    """What a package could not have, a line each."""
    return "".join(f"\n  {reason}" for reason in made.without)
