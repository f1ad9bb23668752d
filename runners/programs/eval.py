"""Subcommands that use a model: `eval IN... OUT` writes results for files, `package` a standalone file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.publish import publish
from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.config.schema import Dataset, Settings
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.metadata.code.snapshot import place_of
from torchrelay.metadata.experiments import Evaluated, note_evaluated
from torchrelay.models.package.reader import Package
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.context import PhaseState, StepContext, step_named
from torchrelay.runners.config_runs.evaluation import (
    PredictionFile,
    format_of,
    load_weights,
    moved_batch,
    write_rows,
)
from torchrelay.runners.config_runs.processes import apart, release
from torchrelay.runners.config_runs.profiles import call_step
from torchrelay.runners.config_runs.selection import phases_of
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.distributed.environment import PLACE
from torchrelay.runners.programs.command_context import BaseCommand, ConfigCommand, say
from torchrelay.runners.programs.epoch_selection import Used, load_what_is_there, use
from torchrelay.runners.programs.program import Program, ProgramCommand
from torchrelay.runners.programs.train import CannotBuildError
from torchrelay.runners.session.local import current_or_new_session

Work = Sequence[tuple[Path, Path]]
"""Files to read, each with the path of its result."""


def evaluate(command: ProgramCommand) -> int:
    """Check all paths, then load the model and evaluate; ranks share the files."""
    with current_or_new_session() as session:
        peers = session.peers
        work = planned(command.request.paths, command.program.result_suffix)
        refuse_to_replace(work, [command.origin.file], ())
        used = _chosen(command, work, peers)
        program = command.made()
        set_seed(program.seed)
        program.load_weights(used.path, used.name)
        own = work[peers.rank :: peers.size]

        def evaluate_own() -> None:
            for path, out in own:
                _one(program, path, out)

        together(peers, "evaluation", evaluate_own)
        _finish(command, used, work, own)
    return 0


def _chosen(command: BaseCommand, work: Work, peers: Peers) -> Used:
    """Choose the epoch, identical on all ranks, after checking that results can be written."""
    together(peers, "paths", lambda: check_writable([out for _, out in work]))
    used = Used(**decide(peers, "run to evaluate", lambda: used_for(command, work)))
    if used.said:
        say(used.said)
    return used


def _finish(command: BaseCommand, used: Used, work: Work, own: Work) -> None:
    """Record the written files and report the result."""
    _note(used.path, command.contents_of((out for _, out in own), written=True))
    say(f"{len(work)} evaluated with epoch {used.epoch} of {used.run}: {command.request.paths[-1]}")


def used_for(command: BaseCommand, work: Work) -> dict[str, Any]:
    """On rank 0: choose run and epoch as `use` does, ignoring the input files as source, and record these.

    Raises UsageError for a result that would replace the run's source.
    """
    read = command.contents_of((path for path, _ in work), written=False)
    command.take_evaluated(read)
    used = use(command)
    run = command.store.find(used["path"])
    source = command.archived_source(run) or {}
    for out in sorted({out for _, out in work}):
        name = command.source_name(run, out)
        if name in source and not command.evaluated.get(place_of(out), {}).get(source[str(name)], False):
            raise _refused(out, f"is part of the source of {used['run']}")
    _note(used["path"], read)
    return used


def _note(run: str, files: Evaluated) -> None:
    """Record evaluated files in the run."""
    with suppress(StorageError):  # in a read-only run such files keep counting as source
        note_evaluated(Path(run), files)


def planned(paths: Sequence[str], suffix: str) -> list[tuple[Path, Path]]:
    """Return the files to read with the paths of their results; raises UsageError for missing files.

    One file goes to the file OUT. Several files, or a directory, go to the directory OUT with the names of
    the inputs and `suffix` appended.
    """
    *given, last = [Path(path) for path in paths]
    inputs: list[Path] = []
    for path in given:
        if path.is_dir():
            inputs += sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        elif path.exists():
            inputs.append(path)
        else:
            raise UsageError(f"{path} does not exist, so it cannot be evaluated")
    if not inputs:
        raise UsageError(f"no file to evaluate in {', '.join(map(str, given))}")
    if len(given) == 1 and not given[0].is_dir() and not last.is_dir():
        return [(inputs[0], last)]
    outs = [last / f"{path.name}{suffix}" for path in inputs]
    twice = {out for out in outs if outs.count(out) > 1}
    if twice:
        raise UsageError(f"two files would have the same result {min(twice)}: evaluate them one by one")
    return list(zip(inputs, outs, strict=True))


def refuse_to_replace(work: Work, kept: Iterable[Path], data: Iterable[Path]) -> None:
    """Raise UsageError for a result that replaces an input, source or a file of `kept`, or is among `data`.

    `data` are files and directories of training data, in which a result would become a sample. Results of
    earlier calls elsewhere are replaced.
    """
    read = {path.resolve() for path, _ in work}
    known = {path.resolve() for path in kept}
    folders = {path.resolve() for path in data}
    for out in sorted({out for _, out in work}):
        place = out.resolve()
        if place in read:
            raise _refused(out, "is one of the files to evaluate")
        if place in known or (out.suffix in (".py", ".yaml", ".yml") and out.exists()):
            raise _refused(out, "is source code of the program")
        if folders & {place, place.parent}:
            raise _refused(out, "is among the data of the configuration")


def _refused(out: Path, why: str) -> UsageError:
    """Return the error for a result path."""
    return UsageError(f"{out} {why}: pass another path for the results as the last argument")


def check_writable(outs: Sequence[Path]) -> None:
    """Create the directory of several results; raises UsageError if results cannot be written."""
    for folder in {out.parent for out in outs}:
        try:
            folder.mkdir(exist_ok=True)
            probe = folder / f".tmp-{secrets.token_hex(6)}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise UsageError(f"results cannot be written to {folder}: {error.strerror}") from error
    for out in outs:
        if out.is_dir():
            raise UsageError(f"the result cannot be written to {out}: it is a directory")


def _one(program: Program, path: Path, out: Path) -> None:
    """Evaluate one file and publish its result atomically."""
    result = program.eval(path)
    publish(out, lambda temporary: program.store_result(result, temporary), overwrite=True)


SUFFIX = ".jsonl"
_NO_WARM_START: dict[str, Any] = {"init_model_path": None, "init_prefix": None, "init_rename": None}


def evaluate_configuration(command: ConfigCommand) -> int:
    """Check all paths, then build the model and evaluate; ranks share the files."""
    runner, dataset = _profile(command)
    work = planned(command.request.paths, SUFFIX)
    settings = command.config.settings
    data = [Path(path) for one in settings.dataset for path in one.data_path if not is_url(path)]
    refuse_to_replace(work, [Path(command.file)], data)
    with command.processes(runner) as peers:
        used = _chosen(command, work, peers)
    with apart(), ExitStack() as stack:
        first = _of(dataset, work[0][0])
        datasets = tuple(first if one.name == dataset.name else one for one in settings.dataset)
        context = _built(command.config, replace(settings, dataset=datasets), runner, used.path, stack)
        (phase,) = context.phases.values()
        peers = context.session.peers
        together(peers, "load", lambda: load_weights(phase, context.settings, runner, used.path, used.name))
        own = work[peers.rank :: peers.size]

        def evaluate_own() -> None:
            phase.model.eval()
            for path, out in own:
                _rows_of_one(context, phase, _of(dataset, path), out)

        together(peers, "evaluation", evaluate_own)
        _finish(command, used, work, own)
    return 0


def fit_configuration(command: ConfigCommand, run: Path, epoch: str) -> None:
    """Load an epoch into what the current code builds, in this process only."""
    runner, keys = replace(command.runner, **_NO_WARM_START), command.runner.checkpoint
    left_out = ((), ()) if keys is None else (keys.resume_exclude or (), keys.exclude or ())
    with apart(), ExitStack() as stack:
        for name in PLACE:
            os.environ.pop(name, None)
        try:
            context = _built(command.config, command.config.settings, runner, str(run), stack)
        except (DamagedError, StorageError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise CannotBuildError(
                f"{run.name} cannot be amended: its model and data cannot be built here "
                f"({type(error).__name__}: {text:.500})"
            ) from error
        load_what_is_there(context.job, run, epoch, *left_out)


def _profile(command: ConfigCommand) -> tuple[RunnerSection, Dataset]:
    """Return the first profile of the mode that infers, else the training one; and its dataset."""
    found = command.inferring()
    runner = found[0] if found else replace(command.runner, kind="infer", **_NO_WARM_START)
    pairs = phases_of(command.config.settings, runner)
    if len(pairs) != 1:
        names = ", ".join(phase.name for phase, _ in pairs) or "none"
        raise UsageError(
            f"eval needs one phase, but runner.{runner.name} has {names}: choose one with "
            f"-o runner.{runner.name}.phases=[NAME]"
        )
    ((phase, dataset),) = pairs
    if dataset is None:
        raise UsageError(f"phase.{phase.name} has no dataset that could read the files")
    return runner, dataset


def _built(
    config: Config, settings: Settings, runner: RunnerSection, run_dir: str, stack: ExitStack
) -> StepContext:
    """Return the context after the steps `setup` and `build`."""
    loader = Loader()
    stack.callback(loader.forget)
    classes = load_classes(settings, runner, loader)
    context = StepContext.of(config, runner, run_dir, classes, settings=settings)
    call_step(step_named("setup"), context)
    stack.callback(lambda: release(context.session, world_stays=True))
    call_step(step_named("build"), context)
    return context


def _of(dataset: Dataset, file: Path) -> Dataset:
    """Return the dataset with this file only."""
    return replace(dataset, data_path=(str(file.absolute()),))


def _rows_of_one(context: StepContext, phase: PhaseState, dataset: Dataset, out: Path) -> None:
    """Write one row per sample of a file, in order; the result is published atomically."""
    loader: Any = Network().build_loader(context, phase.keys, dataset)
    result = PredictionFile(str(out.absolute()), format_of(out.name, None), 0, 1)
    with torch.no_grad(), result.part() as part:
        for batch in loader.placed(0, 1):
            write_rows(phase, batch, phase.model(moved_batch(batch, context.device)), part)
    result.merge({})
    result.close()


def package(command: ProgramCommand) -> int:
    """Load the weights of the selected epoch, write the package, and report what it lacks."""
    request = command.request
    if request.out is None:
        raise UsageError("package needs an output file: pass --out FILE")
    with current_or_new_session():
        used = Used(**use(command))
        if used.said:
            say(used.said)
        program = command.made()
        set_seed(program.seed)
        program.load_weights(used.path, used.name)
        known = {
            "run": used.run,
            "epoch": used.epoch,
            "code_id": used.code_id,
            "program": command.origin.name,
        }
        metadata = {key: value for key, value in known.items() if value is not None}
        made = program.package(request.out, metadata=metadata, overwrite=request.overwrite)
        say(f"epoch {used.epoch} of {used.run}: {made.where}{lacking(made)}")
    return 0


def lacking(made: Package) -> str:
    """List what a package could not include, one line each."""
    return "".join(f"\n  {reason}" for reason in made.without)
