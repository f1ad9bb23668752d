"""The model of a past run, made again: by a function, by the archived program, by the archived configuration.

The archived source runs with this process's rights, as with `load_code`: whoever names a run trusts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.experiments import read_note
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.exports import first_batch
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.selection import MODEL, phases_of
from torchrelay.runners.rebuilding.archives import Archives, archives_of
from torchrelay.runners.rebuilding.program_of_run import program_of
from torchrelay.runners.training.plan import Recipe

_REMEDY = "give the model by --model module:function (model=), a callable that makes it"


@dataclass(frozen=True)
class Made:
    """A module without its weights, and how to get example inputs, where somebody knows."""

    module: nn.Module
    inputs: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Rebuilt:
    """How the model of a run is made; under which blob its weights are saved."""

    make: Callable[[], Made]
    blob: str
    of_batches: bool = False
    """Whether it is called with all that a batch has, labels included."""


@contextmanager
def rebuilt(run: Path | None, factory: Callable[[], Any] | None, blob: str | None) -> Iterator[Rebuilt]:
    """How to make the model of a run; what its code needs stays until the block ends.

    Without a `factory` the run's archived program or configuration makes it. Raises UsageError where nothing
    tells how, DamagedError for an archive that is.
    """
    if factory is not None:
        yield Rebuilt(lambda: _by_factory(factory), blob or MODEL)
        return
    if run is None:
        raise UsageError(f"this is no run directory, so nothing tells its model: {_REMEDY}")
    note = read_note(run)
    try:
        capture_with_code(run)
    except UsageError as error:
        raise UsageError(f"{error}; {_REMEDY}") from None
    with ExitStack() as stack:
        stack.enter_context(apart())
        archives = stack.enter_context(archives_of(run))
        if note is not None and note.is_of_program:
            yield Rebuilt(lambda: _by_program(archives), blob or MODEL)
        elif archives.config is not None:
            yield _by_configuration(archives, archives.config, blob)
        else:
            raise UsageError(f"{run} is the run of a plain job: {_REMEDY}")


def _by_factory(factory: Callable[[], Any]) -> Made:
    made = factory()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model's function returned {made!r:.80}: a module, or (module, example inputs)")
    return Made(model, None if inputs is None else lambda: inputs)


def _by_program(archives: Archives) -> Made:
    program = program_of(archives)
    return Made(program.model, program.example_inputs)


def _by_configuration(archives: Archives, config: Config, blob: str | None) -> Rebuilt:
    """The model of a phase of the profile that trains; data are where the run had them."""
    runner = next((one for one in config.settings.runner if not one.infers), config.settings.runner[0])
    phases = {f"{phase.name}.{MODEL}": phase.name for phase, _ in phases_of(config.settings, runner)}
    chosen = blob or (next(iter(phases)) if len(phases) == 1 else None)
    if chosen not in phases:
        raise UsageError(f"{archives.run} has {', '.join(phases)}: say which by --blob (blob=)")

    def make() -> Made:
        module = archives.module(Recipe("phase", runner.name, phases[chosen]))
        return Made(module, lambda: first_batch(archives.context(runner.name), phases[chosen]))

    return Rebuilt(make, chosen, of_batches=True)
