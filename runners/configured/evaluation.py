"""`eval -m config.yaml IN... OUT`: what the model predicts of samples in files, read by the user's reader."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Dataset, Settings
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.context import PhaseState, StepContext, place_of_process, step_named
from torchrelay.runners.config_runs.evaluation import PredictionFile, format_of, moved_batch, put, rows_of
from torchrelay.runners.config_runs.inference import load_weights
from torchrelay.runners.config_runs.processes import apart, let_go
from torchrelay.runners.config_runs.profiles import call_step
from torchrelay.runners.config_runs.selection import phases_of
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.configured.scene import ConfiguredScene, processes
from torchrelay.runners.distributed.environment import PLACE
from torchrelay.runners.experiment.amend_verb import CannotBuildError, load_what_is_there
from torchrelay.runners.experiment.base_scene import say
from torchrelay.runners.experiment.evaluation_verb import (
    Work,
    check_writable,
    note_results,
    planned,
    refuse_to_replace,
    used_for,
)
from torchrelay.runners.experiment.using import Used

SUFFIX = ".jsonl"
_NO_WARM_START: dict[str, Any] = {"init_model_path": None, "init_prefix": None, "init_rename": None}


def evaluate(scene: ConfiguredScene) -> int:
    """Evaluate, having looked at all paths before anything is built; ranks share the files."""
    runner, dataset = _profile(scene)
    work = planned(scene.request.paths, SUFFIX)
    settings = scene.config.settings
    data = [Path(path) for one in settings.dataset for path in one.data_path if not is_url(path)]
    refuse_to_replace(work, [Path(scene.file)], data)
    with processes(runner) as peers:
        together(peers, "paths", lambda: check_writable([out for _, out in work]))
        used = Used(**decide(peers, "run to evaluate", lambda: used_for(scene, work)))
    if used.said:
        say(used.said)
    with apart(), ExitStack() as stack:
        settings = _reading(scene.config.settings, dataset, work[0][0])
        context = _built(scene.config, settings, runner, used.path, stack)
        (phase,) = context.phases.values()
        peers = context.session.peers
        together(peers, "load", lambda: load_weights(phase, context.settings, runner, used.path, used.name))
        together(peers, "evaluation", lambda: _all(context, phase, dataset, work, peers))
        note_results(scene, used, (out for _, out in work[peers.rank :: peers.size]))
    say(f"{len(work)} evaluated with epoch {used.epoch} of {used.run}: {scene.request.paths[-1]}")
    return 0


def fit(scene: ConfiguredScene, run: Path, epoch: str) -> None:
    """Load an epoch into what the code makes now, in this process alone; raises what that raises."""
    runner, keys = replace(scene.runner, **_NO_WARM_START), scene.runner.checkpoint
    left_out = ((), ()) if keys is None else (keys.resume_exclude or (), keys.exclude or ())
    with apart(), ExitStack() as stack:
        for name in PLACE:
            os.environ.pop(name, None)
        try:
            context = _built(scene.config, scene.config.settings, runner, str(run), stack)
        except (DamagedError, StorageError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise CannotBuildError(
                f"{run.name} cannot be amended: what train builds, its data too, cannot be built here "
                f"({type(error).__name__}: {text:.500})"
            ) from error
        load_what_is_there(context.job, run, epoch, *left_out)


def _profile(scene: ConfiguredScene) -> tuple[RunnerKeys, Dataset]:
    """The first profile of the mode that infers, else the one that trains; its only phase's dataset."""
    found = scene.inferring()
    runner = found[0] if found else replace(scene.runner, kind="infer", **_NO_WARM_START)
    pairs = phases_of(scene.config.settings, runner)
    if len(pairs) != 1:
        names = ", ".join(phase.name for phase, _ in pairs) or "none"
        raise UsageError(
            f"eval takes one phase, runner.{runner.name} has {names}: choose it by "
            f"-o runner.{runner.name}.phases=[NAME]"
        )
    ((phase, dataset),) = pairs
    if dataset is None:
        raise UsageError(f"phase.{phase.name} has no dataset, so nobody reads the files")
    return runner, dataset


def _reading(settings: Settings, dataset: Dataset, file: Path) -> Settings:
    """The same, with that dataset over one file."""
    datasets = tuple(_of(dataset, file) if one.name == dataset.name else one for one in settings.dataset)
    return replace(settings, dataset=datasets)


def _built(
    config: Config, settings: Settings, runner: RunnerKeys, run_dir: str, stack: ExitStack
) -> StepContext:
    """The context behind the steps `setup` and `build`."""
    loader = Loader()
    stack.callback(loader.forget)
    context = StepContext(
        config=config, settings=settings, runner=runner, runner_name=runner.name,
        is_infer=runner.infers,
        run_dir=run_dir, job_options={}, classes=load_classes(settings, runner, loader), env=config.resolved,
        config_yaml=config.name, workspace=config.workspace, **place_of_process(),
    )  # fmt: skip
    call_step(step_named("setup"), context)
    stack.callback(lambda: let_go(context.session, world_stays=True))
    call_step(step_named("build"), context)
    return context


def _of(dataset: Dataset, file: Path) -> Dataset:
    return replace(dataset, data_path=(str(file.absolute()),))


def _all(context: StepContext, phase: PhaseState, dataset: Dataset, work: Work, peers: Peers) -> None:
    phase.model.eval()
    for path, out in work[peers.rank :: peers.size]:
        _one(context, phase, _of(dataset, path), out)


def _one(context: StepContext, phase: PhaseState, dataset: Dataset, out: Path) -> None:
    """A row per sample of a file, in its order; the result takes its place when it is whole."""
    loader: Any = Network().build_loader(context, phase.keys, dataset)
    result = PredictionFile(str(out.absolute()), format_of(out.name, None), 0, 1)
    predict = getattr(phase.model, "predict", None)
    with torch.no_grad(), result.part() as part:
        for batch in loader.placed(0, 1):
            outputs = phase.model(moved_batch(batch, context.device))
            predicted = predict(outputs, batch) if callable(predict) else outputs
            rows = rows_of(predicted, batch.count, f"phase {phase.name}")
            for index, row in zip(batch.indices.tolist(), rows, strict=True):
                put(part, index, row)
    result.merge({})
    result.close()
