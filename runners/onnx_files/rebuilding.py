"""The model of a past run, made again: by a factory, by the archived program, by the archived configuration.

The archived source runs with this process's rights, as with `load_code`: whoever names a run trusts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.config.data_keys import Dataset
from torchrelay.jobs.config.reading import read_config
from torchrelay.metadata.capture import capture_with_code, config_texts
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.extraction import unpack_source
from torchrelay.metadata.code.loading import LoadedCode, load_code
from torchrelay.metadata.experiment.note import Note, read_note
from torchrelay.runners.experiment.program import Program
from torchrelay.runners.lifecycle.apart import apart
from torchrelay.runners.lifecycle.loading import Loader
from torchrelay.runners.lifecycle.selection import MODEL, phases_of, reader_path
from torchrelay.runners.lifecycle.user_objects import made, made_dataset, made_model

RESOLVED = "resolved.yaml"
_REMEDY = "give the model by --model module:function (model=), a callable that makes it"


@dataclass(frozen=True)
class Rebuilt:
    """A model without its weights; under which blob these are saved, and how to get example inputs."""

    model: torch.nn.Module
    blob: str | None
    inputs: Callable[[], Any] | None
    of_batches: bool = False
    """Whether it is called with all that a batch has, labels included."""


@contextmanager
def rebuilt(run: Path, factory: Callable[[], Any] | None, blob: str | None) -> Iterator[Rebuilt]:
    """Make the model of a run; what its code needs stays until the block ends.

    Raises UsageError where nothing tells how, DamagedError for an archive that is.
    """
    with ExitStack() as stack:
        if factory is not None:
            yield _of_factory(factory, blob)
            return
        stack.enter_context(apart())
        note = read_note(run) if run.is_dir() else None
        if note is not None:
            yield _of_program(run, note, blob)
            return
        captured = _captured(run)
        texts = config_texts(run, captured)
        if RESOLVED not in texts:
            raise UsageError(f"{run} is the run of a plain job: {_REMEDY}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-source-")))
        yield _of_configuration(run, captured, texts[RESOLVED], folder, blob, stack)


def _captured(run: Path) -> dict[str, Any]:
    try:
        return capture_with_code(run)
    except UsageError as error:
        raise UsageError(f"{error}; {_REMEDY}") from None


# By a factory


def _of_factory(factory: Callable[[], Any], blob: str | None) -> Rebuilt:
    made_it = factory()
    model, inputs = made_it if isinstance(made_it, tuple) and len(made_it) == 2 else (made_it, None)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the model's function returned {made_it!r:.80}: a module, or (module, example inputs)"
        )
    return Rebuilt(model, blob, None if inputs is None else lambda: inputs)


# By a program


def _of_program(run: Path, note: Note, blob: str | None) -> Rebuilt:
    captured = _captured(run)
    code = load_code(run)
    kind = _program_in(code, captured, note)
    program = kind.__new__(kind)
    texts = config_texts(run, captured)
    if note.config_id is not None and RESOLVED in texts:
        root = next(iter(_roots(captured).values()), str(run))
        program.config = read_config(texts[RESOLVED], RESOLVED, Path(root))
        program.seed = program.config.settings.seed
    program.__init__()  # type: ignore[misc]
    return Rebuilt(program.model, blob or MODEL, program.example_inputs)


def _program_in(code: LoadedCode, captured: Mapping[str, Any], note: Note) -> type[Program]:
    """The class in the archive: that of the file that the run came from."""
    name = _module_name(captured, note)
    if name is None:
        raise UsageError(f"the program {note.origin} is not in the archive of its run; {_REMEDY}")
    module = code.import_module(name)
    kinds = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Program) and one.__module__ == module.__name__
    ]
    named = [one for one in kinds if note.program in (one.name, one.__name__)] or kinds
    if len(named) != 1:
        there = ", ".join(one.__name__ for one in kinds) or "none"
        raise UsageError(f"{note.origin} has not one Program but {there}; {_REMEDY}")
    return named[0]


def _module_name(captured: Mapping[str, Any], note: Note) -> str | None:
    """How the file that a program came from is imported from its archive."""
    for label, root in _roots(captured).items():
        origin = Path(note.origin)
        if origin.is_relative_to(root):
            inside = Path(label) / origin.relative_to(root).with_suffix("")
            folders = sorted(captured["code"].get("import_path") or [""], key=len, reverse=True)
            for folder in folders:
                if inside.is_relative_to(folder or "."):
                    parts = inside.relative_to(folder or ".").parts
                    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


def _roots(captured: Mapping[str, Any]) -> dict[str, str]:
    found = captured["code"].get("roots")
    return dict(found) if isinstance(found, dict) else {}


# By a configuration


def _of_configuration(
    run: Path, captured: Mapping[str, Any], text: bytes, folder: Path, blob: str | None, stack: ExitStack
) -> Rebuilt:
    """The model of a phase by the archived classes; data are where the run had them."""
    with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
        unpack_source(archive, folder)
    config = read_config(text, RESOLVED, folder, [f"workspace={folder}"])
    workspace = next(iter(_roots(captured).values()), str(folder))
    loader = Loader()
    stack.callback(loader.forget)
    runner = next((one for one in config.settings.runner if not one.infers), config.settings.runner[0])
    phases = {f"{phase.name}.{MODEL}": phase for phase, _ in phases_of(config.settings, runner)}
    chosen = blob or (next(iter(phases)) if len(phases) == 1 else None)
    if chosen not in phases:
        raise UsageError(f"{run} has {', '.join(phases)}: say which by --blob (blob=)")
    phase = phases[chosen]
    kind = loader.load(phase.model, f"phase.{phase.name}.model")
    hyper_parameters = config.section("hyper_parameters")
    model = made_model(kind, hyper_parameters, train=False, what=f"phase.{phase.name}.model")
    dataset = next(found for one, found in phases_of(config.settings, runner) if one is phase)
    there = None if dataset is None else _where_it_was(dataset, folder, Path(workspace))
    return Rebuilt(model, chosen, lambda: _first_batch(phase.name, there, loader), of_batches=True)


def _where_it_was(dataset: Dataset, archived: Path, workspace: Path) -> Dataset:
    """The same data, which no archive has, in the directory where the run found them."""
    paths = [Path(one) for one in dataset.data_path]
    moved = [workspace / one.relative_to(archived) if one.is_relative_to(archived) else one for one in paths]
    return replace(dataset, data_path=type(dataset.data_path)(map(str, moved)))


def _first_batch(phase: str, dataset: Dataset | None, loader: Loader) -> Any:
    """The first samples of a phase's data, as its model is called with them."""
    from torchrelay.jobs.epoch_loader import EpochLoader

    path = None if dataset is None else reader_path(dataset)
    if dataset is None or path is None:
        raise UsageError(f"phase.{phase} has no data to take example inputs from: give --input")
    reader = made(loader.load(path, f"dataset.{dataset.name}.data_converter"), dataset)
    samples = made_dataset(reader, dataset)
    batches = EpochLoader(
        samples, dataset.batch_size, shuffle=False, collate=getattr(reader, "collate", None)
    )
    return (next(iter(batches)).data,)
