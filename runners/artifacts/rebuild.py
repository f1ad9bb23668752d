"""Rebuild the model of a past run from its archive, load its weights, and replay recorded calls.

**Rebuilding runs the archived code** with the rights of this process: only use runs that you trust.

A replay rebuilds each recorded module from the archived source and configuration, loads the epoch, repeats
the recorded call and compares the outputs. Settings that could not be reproduced are reported.
"""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blob_files import load_blobs
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.storage.open import FILE, is_url
from torchrelay.errors import DamagedError, RelayError, UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.metadata.code.archive import is_plain, open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.experiments import read_note
from torchrelay.models.onnx.exporter.to_onnx import OnnxFile, check_packages, to_onnx
from torchrelay.models.onnx.exporter.to_onnx import place_of as onnx_place_of
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.context import StepContext
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.selection import MODEL, phases_of
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.config_runs.training import first_batch
from torchrelay.runners.programs.program import Program, made_program
from torchrelay.runners.programs.run_selection import imported
from torchrelay.runners.training.extras.onnx_export import run_facts
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
Where = str | os.PathLike[str]


@dataclass(frozen=True)
class Archives:
    """The archive of an attempt. `source` is the directory of the unpacked source; see `archives_of`."""

    run: Path
    captured: Mapping[str, Any]
    source: Path
    config: Config | None
    """The configuration as read now; its classes come from the archive, its data from their old paths."""
    loader: Loader

    def module(self, recipe: Recipe) -> nn.Module:
        """Construct the model; raises UsageError, and errors of the archived code."""
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
            raise UsageError(f"{recipe.name} returned {model!r:.80}: expected a torch.nn.Module")
        return model

    def changed(self) -> tuple[str, ...]:
        """Describe how the configuration differs from the recorded one."""
        then = self.captured.get("config_id")
        if self.config is None or then is None or self.config.id == then:
            return ()
        return (f"configuration: its id was {str(then)[:12]}, it is {self.config.id[:12]} now",)

    @cached_property
    def code(self) -> LoadedCode:
        """The archived source as modules."""
        return load_code(self.run, int(self.captured["number"]))

    def context(self, runner_name: str) -> StepContext:
        """Build the context of a profile's steps; raises UsageError without a configuration."""
        if self.config is None:
            raise UsageError(f"{self.run} has no configuration that defines its phases")
        settings = self.config.settings
        runner = settings.runner_named(runner_name)
        classes, device = load_classes(settings, runner, self.loader), torch.device("cpu")
        return StepContext.of(self.config, runner, str(self.run), classes, is_infer=False, device=device)


@contextmanager
def archives_of(run: Path, attempt: int | None = None) -> Iterator[Archives]:
    """Unpack the archive of an attempt (by default the newest with one) for the duration of the block.

    Raises UsageError, DamagedError, ConfigError. Modules of a configuration are unloaded at the end.
    """
    captured = capture_with_code(run, attempt)
    with tempfile.TemporaryDirectory(prefix="torchrelay-source-") as scratch:
        source, loader = Path(scratch) / "source", Loader()
        with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
            unpack_source(archive, source)
        folder, config = captured.get("config"), None
        path = run / str(folder) / _RESOLVED
        if is_plain(folder) and path.is_file():
            try:
                config = load_config(path, source=source)
            except ConfigError:  # a missing workspace is replaced by the source
                config = load_config(path, [f"workspace={str(source)!r}"])
        try:
            yield Archives(run, captured, source, config, loader)
        finally:
            loader.forget()


_REMEDY = "pass --model module:function (model=), a callable that returns the model"


def program_of(archives: Archives) -> Program:
    """Create an instance of the Program class that made the run. Raises UsageError if it is not archived."""
    note = read_note(archives.run)
    name = None if note is None else _module_name(archives, Path(note.origin))
    if note is None or name is None:
        origin = archives.run if note is None else note.origin
        raise UsageError(f"the archive of the run does not contain the program {origin}: {_REMEDY}")
    module = archives.code.import_module(name)
    kinds = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Program) and one.__module__ == module.__name__
    ]
    named = [one for one in kinds if note.program in (one.name, one.__name__)] or kinds
    if len(named) != 1:
        there = ", ".join(one.__name__ for one in kinds) or "none"
        raise UsageError(f"{note.origin} has {there} instead of one Program: {_REMEDY}")
    return made_program(named[0], archives.config)


def _module_name(archives: Archives, origin: Path) -> str | None:
    """Return the module name by which the program's file is imported from the archive."""
    folders = sorted(archives.captured["code"].get("import_path") or [""], key=len, reverse=True)
    roots = archives.captured["code"].get("roots")  # original locations of the archived folders
    for label, root in roots.items() if isinstance(roots, dict) else ():
        if not origin.is_relative_to(root):
            continue
        inside = Path(label) / origin.relative_to(root).with_suffix("")
        for folder in folders:
            if inside.is_relative_to(folder or "."):
                parts = inside.relative_to(folder or ".").parts
                return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


BuiltModel = tuple[nn.Module, Callable[[], Any] | None]
"""A module without its weights, and a function that returns example inputs, if there are any."""


@dataclass(frozen=True)
class Rebuilt:
    """Recipe for the model of a run, and the blob that holds its weights."""

    make: Callable[[], BuiltModel]
    blob: str
    of_batches: bool = False
    """True if the model is called with whole batches, labels included."""


@contextmanager
def rebuilt(run: Path | None, factory: Callable[[], Any] | None, blob: str | None) -> Iterator[Rebuilt]:
    """Prepare to build the model of a run; the code that it needs stays loaded until the block ends.

    Without a `factory` the archived program or configuration builds it. Raises UsageError if neither can,
    DamagedError for a damaged archive.
    """
    if factory is not None:

        def given() -> BuiltModel:
            made = factory()
            model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
            if not isinstance(model, nn.Module):
                raise UsageError(
                    f"--model returned {made!r:.80}: expected a module, or (module, example inputs)"
                )
            return model, None if inputs is None else lambda: inputs

        yield Rebuilt(given, blob or MODEL)
        return
    if run is None:
        raise UsageError(f"not a run directory, so its model is unknown: {_REMEDY}")
    note = read_note(run)
    try:
        capture_with_code(run)
    except UsageError as error:
        raise UsageError(f"{error}: {_REMEDY}") from None
    with ExitStack() as stack:
        stack.enter_context(apart())
        archives = stack.enter_context(archives_of(run))
        if note is not None and note.is_of_program:

            def make() -> BuiltModel:
                program = program_of(archives)
                return program.model, program.example_inputs

            yield Rebuilt(make, blob or MODEL)
        elif archives.config is not None:
            settings = archives.config.settings
            runner = next((one for one in settings.runner if not one.infers), settings.runner[0])
            phases = {f"{phase.name}.{MODEL}": phase.name for phase, _ in phases_of(settings, runner)}
            chosen = blob or (next(iter(phases)) if len(phases) == 1 else None)
            if chosen not in phases:
                raise UsageError(f"{run} has {', '.join(phases)}: choose one with --blob (blob=)")
            phase = phases[chosen]

            def make_phase() -> BuiltModel:
                module = archives.module(Recipe("phase", runner.name, phase))
                return module, (lambda: first_batch(archives.context(runner.name), phase))

            yield Rebuilt(make_phase, chosen, of_batches=True)
        else:
            raise UsageError(f"{run} is a run of a plain job: {_REMEDY}")


@dataclass(frozen=True)
class LoadedModel:
    """A module with the weights of an epoch; `run` is None for checkpoints without a run directory."""

    module: nn.Module
    opened: Checkpoint
    run: Path | None
    of_batches: bool
    inputs: Any
    """Example inputs: those given, else those of the run or of the function."""


@contextmanager
def loaded_model(
    where: Where, epoch: int | str, *, model: Any = None, blob: str | None = None, inputs: Any = None
) -> Iterator[LoadedModel]:
    """Build the model and load its weights; the code that it needs stays loaded until the block ends.

    `model` is a module or a callable that returns one; None builds it from the run's archive. Raises
    UsageError if something is missing, and the errors of `open_checkpoint`, its `load` and the user's code.
    """
    opened, run = open_checkpoint(where, epoch), run_of(where)
    factory: Callable[[], Any] | None = (lambda: model) if isinstance(model, nn.Module) else model
    if factory is not None and not callable(factory):
        raise UsageError(f"invalid model={model!r:.80}: expected a module or a callable that returns one")
    if run is None and factory is None:
        raise UsageError(f"{where} is not a run directory, so its model is unknown: pass model= (--model)")
    with rebuilt(run, factory, blob) as found:
        module, given = found.make()
        if found.blob not in opened.blobs:
            raise UsageError(
                f"epoch {opened.epoch} has no blob {found.blob!r}, it has {', '.join(opened.blobs)}: "
                "choose one with blob= (--blob)"
            )
        opened.load_saved({found.blob: module})
        example = given() if inputs is None and given is not None else inputs
        if example is None:
            raise UsageError("example inputs are missing: pass inputs= (--input x=float32[batch,10])")
        yield LoadedModel(module, opened, run, found.of_batches, example)


def run_of(where: Where) -> Path | None:
    """Return the run directory; None if there are checkpoints only."""
    text = os.fspath(where)
    if is_url(text) and not text.startswith(FILE):
        return None
    path = Path(text.removeprefix(FILE)).absolute()
    return path if (path / "run.json").is_file() else None


_TEXT = re.compile(r"(\w[\w.]*)=(\w+)\[([^\[\]]*)\]")


def typed_inputs(texts: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Make example tensors by name, and the names of their dynamic sizes, as `to_onnx` takes them.

    Floating types are drawn from a normal distribution, integers are zero. A size is a number, a name
    (3 in the example), or `name=size`. Raises UsageError.
    """
    tensors, dynamic = dict[str, torch.Tensor](), dict[str, dict[int, str]]()
    draw = torch.Generator().manual_seed(0)
    for text in texts:
        found = _TEXT.fullmatch(text)
        dtype = getattr(torch, found[2], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"invalid --input {text!r}: expected name=dtype[sizes], for example x=float32[batch,3,32,32]"
            )
        sizes = [_size(text, one.strip()) for one in found[3].split(",") if one.strip()]
        shape = [size for _, size in sizes]
        kind = dtype.is_floating_point or dtype.is_complex
        tensors[found[1]] = (
            torch.randn(shape, generator=draw).to(dtype) if kind else torch.zeros(shape, dtype=dtype)
        )
        dynamic[found[1]] = {dim: name for dim, (name, _) in enumerate(sizes) if name is not None}
    return tensors, dynamic


def _size(text: str, one: str) -> tuple[str | None, int]:
    """Parse one size into its name, if it has one, and its number."""
    name, equals, number = one.partition("=")
    if one.isascii() and one.isdecimal() and int(one[:9]) > 0:
        return None, int(one)
    if name.isidentifier() and (not equals or (number.isascii() and number.isdecimal() and int(number) > 0)):
        return name, int(number) if equals else 3
    raise UsageError(f"--input {text!r}: invalid size {one!r}: expected 32, batch, or time=16")


def named(text: str, what: str) -> Any:
    """Import `module:name` of the option `what`, from the working directory first; raises UsageError."""
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"invalid {what} {text!r:.80}: expected module:name")
    found = imported(module, name, what)
    if not callable(found):
        raise UsageError(f"{what}: {module} has no callable {name}")
    return found


def run_to_onnx(
    where: str | os.PathLike[str],
    path: str | os.PathLike[str],
    epoch: int | str = "last",
    *,
    model: Callable[[], Any] | torch.nn.Module | None = None,
    inputs: Any = None,
    blob: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> OnnxFile:
    """Write the model of an epoch of a run directory, or of checkpoints, as an ONNX file.

    For a run of a `Program` or of a configuration the model is rebuilt **by running the archived source**.

    Args:
        where: Run directory, or directory of checkpoints.
        path: The ONNX file to write.
        epoch: A number, `"last"`, `"best"`, or a tag.
        model: A module, or a callable that returns one or (module, example inputs). Required for runs of
            plain jobs.
        inputs: Example inputs; default: those of the data (`Program.example_inputs`).
        blob: The blob with the weights; default `model`. For several phases `"<phase>.model"` selects one.
        overwrite: Replace an existing file.
        options: Options of `to_onnx`.

    Returns:
        The written file. Its metadata holds run, epoch, code id and metrics.

    Raises:
        UsageError: The model or its inputs are unknown; also errors of `open_checkpoint`, its `load`,
            `to_onnx`.

    Example:
        run_to_onnx("runs/x", "x.onnx", epoch="best")
    """
    check_packages()
    onnx_place_of(path, overwrite=overwrite)
    with loaded_model(where, epoch, model=model, blob=blob, inputs=inputs) as found:
        options.setdefault("drop_unused", found.of_batches)
        known = run_facts(found.run, str(found.opened.position), found.opened.metrics)
        facts = known | dict(options.pop("metadata", None) or {})
        done: OnnxFile = to_onnx(
            found.module, found.inputs, path, overwrite=overwrite, metadata=facts, **options
        )
        return done


@dataclass(frozen=True)
class Replayed:
    """Result of one replayed module: `same` bits, why not, and settings that were not reproduced."""

    epoch: int
    blob: str
    same: bool
    why: str = ""
    not_reproduced: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield lines for the console."""
        outcome = "same bits" if self.same else f"NOT the same: {self.why}"
        yield f"epoch {self.epoch}  {self.blob}  {outcome}"
        for text in self.not_reproduced:
            yield f"  not reproduced: {text}"


def replay(run: Path, wish: int | None = None) -> list[Replayed]:
    """Replay the recorded calls of an epoch (the newest saved one if None). Runs the archived code.

    Raises UsageError if nothing is recorded, DamagedError for a changed file, StorageError.
    """
    files = files_of(run)
    if not files:
        raise UsageError(
            f"{run} has no recorded calls ({FOLDER}/): train with JobRunner(replay=...), `replay: true` in a "
            "runner, or replay = True in a Program"
        )
    there = {one.position.epoch for one in read_log(place_of(run)).line() if one.position.boundary}
    usable = [one for one in files if one[0] in there and wish in (None, one[0])]
    if not usable:
        names = ", ".join(str(number) for number, _ in files)
        raise UsageError(
            f"{run} has recorded calls of epoch {names}; none of them is both saved and requested"
        )
    epoch, path = usable[-1]
    recorded = load_blobs(path)
    about = recorded.get(FACTS)
    try:
        calls, attempt = about["calls"], about["attempt"]  # type: ignore[index]
        with archives_of(run, attempt) as archives:
            return [_replayed(run, epoch, name, call, recorded, archives) for name, call in calls.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} holds no call that can be replayed: {error}") from error


def _replayed(
    run: Path, epoch: int, name: str, call: Mapping[str, Any], recorded: Mapping[str, Any], archives: Archives
) -> Replayed:
    settings = call["settings"]
    if not isinstance(settings, dict):
        raise TypeError("its settings are not a mapping")
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
        except Exception as error:  # archived code raises anything
            known = isinstance(error, RelayError)
            why = str(error) if known else "".join(traceback.format_exception_only(error)).strip()
            return Replayed(epoch, name, same=False, why=why, not_reproduced=archives.changed())
        now = settings_now(device_of(module))
    differs = (
        f"{what} was {settings.get(what)}, is {one} here"
        for what, one in now.items()
        if settings.get(what) != one
    )
    why = _difference(call["gives"], form, outputs, found)
    return Replayed(epoch, name, not why, why, (*differs, *archives.changed()))


def _difference(then: Any, now: Any, outputs: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    if then != now or len(outputs) != len(found):
        return "the outputs have a different structure"
    texts = []
    for number, (old, new) in enumerate(zip(outputs, found, strict=True)):
        if same_bits(old, new):
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            was, now = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (old, new))
            texts.append(f"output {number} was {was}, is now {now}")
            continue
        difference = (old.double() - new.double()).abs()
        texts.append(
            f"output {number}: {int((old != new).sum())} of {old.numel()} numbers, the greatest difference "
            f"is {float(difference.max()):.3g}"
        )
    return "; ".join(texts)
