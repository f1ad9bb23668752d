"""`torchrelay package RUN@best --out FILE`: a run by its directory, packaged by its archived code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import ProgramRun, read_note
from torchrelay.records import dataclass
from torchrelay.runners.programs.archived_code import perform_archived
from torchrelay.runners.programs.request import Request
from torchrelay.runners.remote_runs.resolve import Selector, existing_directory, locate, parse_selector

if TYPE_CHECKING:
    from torchrelay.runners.artifacts.loaded_model import LoadedModel


@dataclass(frozen=True)
class Typed:
    """What was typed of the model: `--model module:function`, `--blob`, `--input` as often as wanted."""

    model: str | None = None
    blob: str | None = None
    inputs: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """The options that were."""
        known = {"--model": self.model, "--blob": self.blob, "--input": self.inputs}
        return [name for name, value in known.items() if value]


def package_run(target: str, request: Request, typed: Typed) -> int | None:
    """Package the run that a text means; None where it means no run, and no checkpoints of a `--model`.

    The program of a run does it by its archived script, in a process of its own. Any other model is made
    here, by the archived configuration or by `--model`. Raises UsageError for options that are for others.
    """
    selector = parse_selector(target)
    path = Path(selector.path).absolute()
    if not path.is_dir() and not (is_url(selector.path) and typed.model is not None):
        if typed.given:
            raise UsageError(f"{', '.join(typed.given)}: for a run by its directory, which {target} is not")
        if selector.wish is not None and not is_url(selector.path):
            existing_directory(selector.path)
        return None
    if request.run_id is not None or request.ignore or (selector.wish and request.epoch is not None):
        raise UsageError(f"{target} says which run and epoch: leave --run, --ignore and --epoch out")
    epoch = request.epoch if selector.wish is None else selector.epoch
    note = read_note(path) if path.is_dir() else None
    if note is None:
        locate(selector.path)
    if note is None or not note.is_of_program or typed.model is not None:
        return _package_here(selector, epoch or "last", request, typed)
    if typed.given:
        raise UsageError(f"{', '.join(typed.given)}: the program of the run says it; or give --model, too")
    return perform_archived(ProgramRun(path, note), request, epoch)


def _package_here(selector: Selector, epoch: str, request: Request, typed: Typed) -> int:
    from torchrelay.models.package.api import save
    from torchrelay.runners.artifacts.loaded_model import loaded_model, named, typed_inputs
    from torchrelay.runners.programs.command_context import say
    from torchrelay.runners.programs.eval import lacking

    if request.config is not None:
        raise UsageError("-m is for programs: a run has its configuration")
    model = None if typed.model is None else named(typed.model, "--model")
    given = typed_inputs(typed.inputs)
    inputs: Any = given.tensors or None
    with loaded_model(selector.path, epoch, model=model, blob=typed.blob, inputs=inputs) as found:
        made = save(
            request.out or "", found.module, found.inputs, dynamic=given.dynamic or None,
            metadata=_metadata(selector.path, found), drop_unused=found.of_batches,
            overwrite=request.overwrite,
        )  # fmt: skip
    say(f"epoch {found.opened.epoch} of {Path(selector.path).name}: {made.where}{lacking(made)}")
    return 0


def _metadata(where: str, found: LoadedModel) -> dict[str, Any]:
    from torchrelay.models.package.api import code_id_of_run

    known = {"run": Path(where).name, "epoch": found.opened.epoch, "code_id": code_id_of_run(where)}
    return {key: value for key, value in known.items() if value is not None}
