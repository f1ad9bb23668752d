"""Which parts of a configuration a profile uses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Dataset, Phase, Settings
from torchrelay.jobs.config.section_types import ClassPath, split_weights

MODEL, OPTIMIZER, LOADER, SCHEDULER = "model", "optimizer", "loader", "scheduler"
"""What a phase's blobs are called, below its name."""


def phases_of(settings: Settings, runner: RunnerKeys) -> list[tuple[Phase, Dataset | None]]:
    """The phases of a profile in their order, each with its dataset."""
    known = {one.name: one for one in settings.phase}
    names = list(known) if runner.phases is None else runner.phases
    return [(known[name], _dataset(settings, known[name])) for name in names]


def validation_dataset(settings: Settings, phase: Phase) -> Dataset | None:
    """What a phase is measured on while it trains."""
    if phase.validation is None:
        return None
    return next(one for one in settings.dataset if one.name == phase.validation.dataset_name)


def datasets_of(settings: Settings, runner: RunnerKeys) -> list[Dataset]:
    """All datasets that a profile reads, each once."""
    found: dict[str, Dataset] = {}
    for phase, dataset in phases_of(settings, runner):
        more = None if runner.infers else validation_dataset(settings, phase)
        found |= {one.name: one for one in (dataset, more) if one is not None}
    return list(found.values())


def reader_path(dataset: Dataset) -> ClassPath | None:
    """The class that reads a dataset."""
    path, name = dataset.data_converter, dataset.reader_class_name
    return path if path is None or name is None else replace(path, name=name)


def optimizer_path(settings: Settings) -> ClassPath | None:
    """The optimizer's class where it is none of torch.optim's."""
    optimizer = settings.hyper_parameters.optimizer
    if optimizer is None or ":" not in optimizer.kind:
        return None
    module, _, name = optimizer.kind.rpartition(":")
    return ClassPath(optimizer.kind, name, module=module)


def run_directory_of(settings: Settings, runner: RunnerKeys) -> str:
    """Where a profile that trains keeps its run."""
    if runner.save_checkpoint_path is not None:
        return runner.save_checkpoint_path
    return "/".join(part for part in (settings.run_dir, settings.name, runner.name) if part)


def weights_place(runner: RunnerKeys) -> tuple[str | None, int | str | None]:
    """The run or file that `init_model_path` names, and the epoch behind it: `RUN@7`, `RUN@best`, `RUN/7`."""
    return (None, None) if runner.init_model_path is None else split_weights(runner.init_model_path)


def epochs_place(settings: Settings, runner: RunnerKeys) -> str:
    """Where `infer` finds epochs: its `init_model_path`, else the run of the only profile that trains.

    That is the only one of the mode, or of the file where the mode has none.
    """
    where, _ = weights_place(runner)
    if where is not None:
        return where
    trained = settings.training()
    if len(trained) == 1:
        return run_directory_of(settings, trained[0])
    raise UsageError(
        f"runner.{runner.name}: `init_model_path` missing, and {len(trained)} runners train: say where the "
        "epochs are"
    )


def is_of_training(settings: Settings, runner: RunnerKeys) -> bool:
    """Whether `infer` looks at what a profile of this configuration trains, by name or for want of one."""
    where, _ = weights_place(runner)
    return where is None or where in [
        run_directory_of(settings, one) for one in settings.runner if not one.infers
    ]


def stored_phase(settings: Settings, phase: Phase, stored: Collection[str]) -> str | None:
    """The phase whose stored model a phase takes; `stored` are the names of blobs that are there.

    The one of its own name, else the only other one of the same model class, else the only one there is.
    None where none of these is there.
    """
    there = [name.removesuffix(f".{MODEL}") for name in stored if name.endswith(f".{MODEL}")]
    if phase.name in there:
        return phase.name
    alike = [one.name for one in settings.phase if one.model == phase.model and one.name in there]
    if len(alike) == 1:
        return alike[0]
    return there[0] if len(there) == 1 else None


def keeping(runner: RunnerKeys) -> dict[str, Any]:
    """What JobRunner is told of which epochs stay. Every epoch is saved; an interval thins what stays."""
    interval, every, last = runner.save_checkpoint_interval, runner.keep_every, runner.keep_last
    best = None if runner.keep_best is None else (runner.keep_best.metric, runner.keep_best.mode)
    if interval == 1 and every is None and last is None:
        return {"best": best}
    if interval > 1:
        every = interval if every is None else math.lcm(interval, every)
    kept: Mapping[str, Any] = {"keep_every": every, "keep_last": last or 1, "keep_best": best}
    return {"best": best, **{name: one for name, one in kept.items() if one is not None}}


def _dataset(settings: Settings, phase: Phase) -> Dataset | None:
    if phase.dataset_name is None:
        return settings.dataset[0] if len(settings.dataset) == 1 else None
    return next(one for one in settings.dataset if one.name == phase.dataset_name)
