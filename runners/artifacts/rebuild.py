"""The model of a past run, made again from its archive; and whether that gives the same bits.

**Making a model runs the archived code**, with this process's rights: whoever names a run trusts it.

The archived source runs with this process's rights, as with `load_code`: whoever names a run trusts it.

Rebuild each recorded module from the archived source and configuration, load the epoch, play the recorded
call, compare. What of then could not be had again is named, whether it mattered or not.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blob_files import load_blobs
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.errors import DamagedError, RelayError, UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.metadata.code.archive import is_plain, open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.experiments import read_note
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.context import StepContext
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.selection import MODEL, phases_of
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.config_runs.training import first_batch
from torchrelay.runners.programs.program import Program, made_program
from torchrelay.runners.training.extras.replay import (
    FACTS,
    FOLDER,
    as_it_was,
    device_of,
    files_of,
    play,
    same_bits,
    settings_now,
)
from torchrelay.runners.training.plan import Recipe

_RESOLVED = "resolved.yaml"


@dataclass(frozen=True)
class Archives:
    """What a start of a run has archived. `source` is where the source is unpacked; see `archives_of`."""

    run: Path
    captured: Mapping[str, Any]
    source: Path
    config: Config | None
    """As it is read now; its classes are those of the archive, its data where they were."""
    loader: Loader

    def module(self, recipe: Recipe) -> nn.Module:
        """The model as it is constructed; raises UsageError, and what the archived code raises."""
        if recipe.kind == "phase":
            context = self.context(recipe.module)
            phase = next(one for one in context.settings.phase if one.name == recipe.name)
            own = context.classes.steps.get("build", Network)
            network: Any = (own if hasattr(own, "build_model") else Network)(context)
            model = network.build_model(context, phase)
        else:
            module: Any = self.code.import_module(recipe.in_archive(self.code.script))
            found = reduce(getattr, recipe.name.split("."), module)
            is_function = recipe.kind == "function"
            model = found() if is_function else made_program(found, self.config).make_model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{recipe.name} made {model!r:.80}, which is no torch module")
        return model

    def changed(self) -> list[str]:
        """What of the configuration is not as it was then."""
        then = self.captured.get("config_id")
        if self.config is None or then is None or self.config.id == then:
            return []
        return [f"configuration: its id was {str(then)[:12]}, it is {self.config.id[:12]} now"]

    @cached_property
    def code(self) -> LoadedCode:
        """The source as modules."""
        return load_code(self.run, int(self.captured["number"]))

    def context(self, runner_name: str) -> StepContext:
        """What the steps of a profile begin with; raises UsageError where there is no configuration."""
        if self.config is None:
            raise UsageError(f"{self.run} has no configuration to make a phase of")
        settings = self.config.settings
        runner = settings.runner_named(runner_name)
        classes, device = load_classes(settings, runner, self.loader), torch.device("cpu")
        return StepContext.of(self.config, runner, str(self.run), classes, is_infer=False, device=device)


@contextmanager
def archives_of(run: Path, attempt: int | None = None) -> Iterator[Archives]:
    """The archives of a start (the newest that has any), unpacked for the time of the block.

    Raises UsageError, DamagedError, ConfigError. Modules of a configuration are forgotten at the end.
    """
    captured = capture_with_code(run, attempt)
    with tempfile.TemporaryDirectory(prefix="torchrelay-source-") as scratch:
        source, loader = Path(scratch) / "source", Loader()
        with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
            unpack_source(archive, source)
        try:
            yield Archives(run, captured, source, _configuration(run, captured, source), loader)
        finally:
            loader.forget()


def _configuration(run: Path, captured: Mapping[str, Any], source: Path) -> Config | None:
    """None where there was none. Where its workspace is gone, or on another machine, the source will do."""
    folder = captured.get("config")
    path = run / str(folder) / _RESOLVED
    if not is_plain(folder) or not path.is_file():
        return None
    try:
        return load_config(path, source=source)
    except ConfigError:
        return load_config(path, [f"workspace={str(source)!r}"])


_REMEDY = "give the model by --model module:function (model=), a callable that makes it"


def program_of(archives: Archives) -> Program:
    """A new object of the class that the run was made by.

    Raises UsageError where the archive does not have it, and what the archived code raises.
    """
    note = read_note(archives.run)
    name = None if note is None else _module_name(archives, Path(note.origin))
    if note is None or name is None:
        origin = archives.run if note is None else note.origin
        raise UsageError(f"the program {origin} is not in the archive of its run; {_REMEDY}")
    module = archives.code.import_module(name)
    kinds = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Program) and one.__module__ == module.__name__
    ]
    named = [one for one in kinds if note.program in (one.name, one.__name__)] or kinds
    if len(named) != 1:
        there = ", ".join(one.__name__ for one in kinds) or "none"
        raise UsageError(f"{note.origin} has not one Program but {there}; {_REMEDY}")
    return made_program(named[0], archives.config)


def _module_name(archives: Archives, origin: Path) -> str | None:
    """How the file that a program came from is imported from its archive."""
    folders = sorted(archives.captured["code"].get("import_path") or [""], key=len, reverse=True)
    roots = archives.captured["code"].get("roots")  # where the folders of the archive lay
    for label, root in roots.items() if isinstance(roots, dict) else ():
        if not origin.is_relative_to(root):
            continue
        inside = Path(label) / origin.relative_to(root).with_suffix("")
        for folder in folders:
            if inside.is_relative_to(folder or "."):
                parts = inside.relative_to(folder or ".").parts
                return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


@dataclass(frozen=True)
class BuiltModel:
    """A module without its weights, and how to get example inputs, where somebody knows."""

    module: nn.Module
    inputs: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Rebuilt:
    """How the model of a run is made; under which blob its weights are saved."""

    make: Callable[[], BuiltModel]
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

            def make() -> BuiltModel:
                program = program_of(archives)
                return BuiltModel(program.model, program.example_inputs)

            yield Rebuilt(make, blob or MODEL)
        elif archives.config is not None:
            yield _by_configuration(archives, archives.config, blob)
        else:
            raise UsageError(f"{run} is the run of a plain job: {_REMEDY}")


def _by_factory(factory: Callable[[], Any]) -> BuiltModel:
    made = factory()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model's function returned {made!r:.80}: a module, or (module, example inputs)")
    return BuiltModel(model, None if inputs is None else lambda: inputs)


def _by_configuration(archives: Archives, config: Config, blob: str | None) -> Rebuilt:
    """The model of a phase of the profile that trains; data are where the run had them."""
    runner = next((one for one in config.settings.runner if not one.infers), config.settings.runner[0])
    phases = {f"{phase.name}.{MODEL}": phase.name for phase, _ in phases_of(config.settings, runner)}
    chosen = blob or (next(iter(phases)) if len(phases) == 1 else None)
    if chosen not in phases:
        raise UsageError(f"{archives.run} has {', '.join(phases)}: say which by --blob (blob=)")

    def make() -> BuiltModel:
        module = archives.module(Recipe("phase", runner.name, phases[chosen]))
        return BuiltModel(module, lambda: first_batch(archives.context(runner.name), phases[chosen]))

    return Rebuilt(make, chosen, of_batches=True)


NOT_SAME = 1


@dataclass(frozen=True)
class Replayed:
    """What came of one module: `same` bits or not, why not, and which settings were not reproduced."""

    epoch: int
    blob: str
    same: bool
    why: str = ""
    not_reproduced: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """As an object of `verify --replay --json`."""
        return {**asdict(self), "not_reproduced": list(self.not_reproduced)}

    def lines(self) -> Iterator[str]:
        """For people."""
        outcome = "same bits" if self.same else f"NOT the same: {self.why}"
        yield f"epoch {self.epoch}  {self.blob}  {outcome}"
        for text in self.not_reproduced:
            yield f"  not reproduced: {text}"


def replay(run: Path, wish: int | None = None) -> list[Replayed]:
    """Play what is recorded of an epoch (the newest saved one if None) again.

    Runs the archived code. Raises UsageError where nothing is recorded, DamagedError for a file that was
    changed, StorageError.
    """
    epoch, path = _chosen(run, wish)
    recorded = load_blobs(path)
    about = recorded.get(FACTS)
    try:
        calls, attempt = about["calls"], about["attempt"]  # type: ignore[index]
        with archives_of(run, attempt) as archives:
            return [_replayed(run, epoch, name, call, recorded, archives) for name, call in calls.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} says nothing that can be played again: {error}") from error


def _chosen(run: Path, wish: int | None) -> tuple[int, Path]:
    files = files_of(run)
    if not files:
        raise UsageError(
            f"{run} has no recorded call ({FOLDER}/): train with JobRunner(replay=...), `replay: true` of a "
            "runner, or replay = True of a Program"
        )
    there = {one.position.epoch for one in read_log(place_of(run)).line() if one.position.boundary}
    usable = [one for one in files if one[0] in there and wish in (None, one[0])]
    if not usable:
        names = ", ".join(str(number) for number, _ in files)
        raise UsageError(f"{run}: calls are recorded of epoch {names}; none of these is saved and meant")
    return usable[-1]


def _replayed(
    run: Path, epoch: int, name: str, call: Mapping[str, Any], recorded: Mapping[str, Any], archives: Archives
) -> Replayed:
    settings = call["settings"]
    if not isinstance(settings, dict):
        raise TypeError("its settings are no table")
    inputs = [recorded[f"takes.{name}.{number}"] for number in range(call["inputs"])]
    outputs = [recorded[f"gives.{name}.{number}"] for number in range(call["outputs"])]
    recipe = Recipe.from_json(call["recipe"])
    with as_it_was(settings):
        try:
            module = archives.module(recipe)
            open_checkpoint(run, epoch).load({name: module})
            if settings.get("device") != "cpu" and torch.cuda.is_available():
                module = module.to("cuda")
            form, found = play(module, call["takes"], inputs)
        except RelayError as error:
            return Replayed(epoch, name, same=False, why=str(error), not_reproduced=_told(archives, {}))
        except Exception as error:  # archived code raises anything
            last = "".join(traceback.format_exception_only(error)).strip()
            return Replayed(epoch, name, same=False, why=last, not_reproduced=_told(archives, {}))
        now = settings_now(device_of(module))
    differs = {
        f"{what} was {settings.get(what)}": one for what, one in now.items() if settings.get(what) != one
    }
    why = _difference(call["gives"], form, outputs, found)
    return Replayed(epoch, name, same=not why, why=why, not_reproduced=_told(archives, differs))


def _told(archives: Archives, differs: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(f"{then}, is {now} here" for then, now in differs.items()), *archives.changed())


def _difference(then: Any, now: Any, outputs: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    """What differs between the outputs, in words; empty where nothing does."""
    if then != now or len(outputs) != len(found):
        return "the outputs have another form"
    texts = []
    for number, (old, new) in enumerate(zip(outputs, found, strict=True)):
        if same_bits(old, new):
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            texts.append(f"output {number} was {_kind(old)}, is {_kind(new)}")
            continue
        apart = (old.double() - new.double()).abs()
        texts.append(
            f"output {number}: {int((old != new).sum())} of {old.numel()} numbers, the greatest difference "
            f"is {float(apart.max()):.3g}"
        )
    return "; ".join(texts)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
