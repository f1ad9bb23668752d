"""What a profile takes from its configuration: file, parts, device, and what its run is told of it."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import CLUSTER_TRAIN, LOCAL_TRAIN, RunnerSection
from torchrelay.jobs.config.schema import Dataset, Phase, Settings
from torchrelay.jobs.config.section_types import ClassPath, split_weights
from torchrelay.metadata.code.capture import Given
from torchrelay.metadata.code.selection import Sources
from torchrelay.runners.training.extras.upstream import InitFrom, Upstream
from torchrelay.runners.training.plan import Recipe

if TYPE_CHECKING:
    import torch


MODEL, OPTIMIZER, LOADER, SCHEDULER = "model", "optimizer", "loader", "scheduler"
"""What a phase's blobs are called, below its name."""


def phases_of(settings: Settings, runner: RunnerSection) -> list[tuple[Phase, Dataset | None]]:
    """The phases of a profile in their order, each with its dataset."""
    known = {one.name: one for one in settings.phase}
    names = list(known) if runner.phases is None else runner.phases
    return [(known[name], _dataset(settings, known[name])) for name in names]


def validation_dataset(settings: Settings, phase: Phase) -> Dataset | None:
    """What a phase is measured on while it trains."""
    if phase.validation is None:
        return None
    return next(one for one in settings.dataset if one.name == phase.validation.dataset_name)


def datasets_of(settings: Settings, runner: RunnerSection) -> list[Dataset]:
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


def run_directory_of(settings: Settings, runner: RunnerSection) -> str:
    """Where a profile that trains keeps its run."""
    if runner.save_checkpoint_path is not None:
        return runner.save_checkpoint_path
    return "/".join(part for part in (settings.run_dir, settings.name, runner.name) if part)


def weights_place(runner: RunnerSection) -> tuple[str | None, int | str | None]:
    """The run or file that `init_model_path` names, and the epoch behind it: `RUN@7`, `RUN@best`, `RUN/7`."""
    return (None, None) if runner.init_model_path is None else split_weights(runner.init_model_path)


def epochs_place(settings: Settings, runner: RunnerSection) -> str:
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


def is_of_training(settings: Settings, runner: RunnerSection) -> bool:
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


def keeping(runner: RunnerSection) -> dict[str, Any]:
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


def device_of(runner: RunnerSection, local_rank: int) -> torch.device:
    """The device of a process; raises UsageError, with the reason, for one that cannot be had.

    `auto` is the GPU of the local rank where there is one. `selected_gpus` are taken in their order, by local
    rank.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = f"runner.{runner.name}"
    if runner.device == "cpu" or (runner.device == "auto" and not count and runner.selected_gpus is None):
        return torch.device("cpu")
    if not count:
        key = "selected_gpus" if runner.selected_gpus is not None else f"device: {runner.device}"
        raise UsageError(f"{own} has `{key}`, and this machine shows no GPU: write `device: cpu` or `auto`")
    chosen = tuple(range(count)) if runner.selected_gpus is None else runner.selected_gpus
    beyond = [one for one in chosen if one >= count]
    if beyond:
        raise UsageError(f"{own}.selected_gpus has GPU {beyond[0]}, this machine shows 0 to {count - 1}")
    if local_rank >= len(chosen):
        raise UsageError(
            f"{own} may use {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}, and more processes were "
            f"started on this machine (local rank {local_rank}): start one per GPU, or write `device: cpu`"
        )
    return torch.device("cuda", chosen[local_rank])


def check_launch(runner: RunnerSection, *, launched: bool, world_size: int) -> None:
    """Raise UsageError where a profile and the way in which it was started contradict each other."""
    own = f"runner.{runner.name}"
    if runner.kind == CLUSTER_TRAIN and not launched:
        raise UsageError(
            f"{own}.class is {CLUSTER_TRAIN}, which runs under a launcher only: torchrun ... -m torchrelay "
            f"run -m config.yaml; write `train` for one process, `{LOCAL_TRAIN}` for several on this machine"
        )
    if runner.kind == LOCAL_TRAIN and launched and world_size != runner.worker_num:
        raise UsageError(
            f"{own}.class is {LOCAL_TRAIN}, which starts {runner.worker_num} processes itself, and a "
            f"launcher has started {world_size}: write `train`, or start without the launcher"
        )
    if runner.device == "cpu" and runner.selected_gpus is not None:
        raise UsageError(f"{own}: `selected_gpus` and `device: cpu` contradict each other: keep one of them")


_FILE = "config.yaml"
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def file_within(text: str) -> str:
    """A path as it is; of a directory the `config.yaml` in it. Imports nothing.

    What cannot be looked at is returned as it is too, and so is the empty text, which names nothing.
    """
    with suppress(OSError, ValueError):
        return str(Path(text) / _FILE) if text and Path(text).is_dir() else text
    return text


def config_file(text: str) -> str:
    """A path as it is; of a directory, and of a package that can be found, the `config.yaml` in it.

    A package is looked for below the working directory, then where imports are. What is neither is returned
    as it is too, so that reading it says what is wrong. Of a dotted name the packages around it are imported.
    """
    if (found := file_within(text)) != text:
        return found
    if Path(text).exists() or not _PACKAGE.fullmatch(text):
        return text
    here = Path(*text.split("."), _FILE)  # the directory of a command is not among the places of imports
    if here.is_file():
        return str(here.absolute())
    try:
        spec = importlib.util.find_spec(text)
    except ImportError:
        return text
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((str(Path(one) / _FILE) for one in folders if (Path(one) / _FILE).is_file()), text)


_WRITTEN = (
    "save_checkpoint_path", "save_step_path", "save_inference_path", "runner_result_dump_path",
    "predictions_path", "metrics_path",
)  # fmt: skip
"""Keys of runners that name what is written."""


def source_of(config: Config) -> Sources:
    """What lies in the workspace, without the file of the configuration, data, and what runners write."""
    settings, workspace = config.settings, config.workspace
    paths = [config.name, settings.run_dir]
    paths += [path for one in settings.dataset for path in one.data_path]
    paths += [path for one in settings.runner for key in _WRITTEN if (path := getattr(one, key))]
    paths += [path for one in settings.runner if (path := weights_place(one)[0])]
    inside = [Path(os.path.abspath(path)) for path in paths if not is_url(path)]  # noqa: PTH100
    names = [one.relative_to(workspace).as_posix() for one in inside if workspace in one.parents]
    # Written as .gitignore takes a name.
    left_out = ["/" + "".join(f"\\{one}" if one in "*?[]!# \\" else one for one in name) for name in names]
    return Sources([workspace], exclude=left_out)


def recorded(config: Config) -> Given:
    """The file as it was read, what it came to, and the overrides, for `config/` of the run directory."""
    quoted = [one.replace("'", "''") for one in config.overrides.texts]  # as YAML does in single quotes
    overrides = "".join(f"- '{one}'\n" for one in quoted) or "[]\n"
    files = {
        "source.yaml": config.source,
        "resolved.yaml": config.resolved_text().encode(),
        "overrides.yaml": overrides.encode(),
    }
    return Given(files, config.id, config.overrides.texts)


def built_on(config: Config) -> dict[str, Any]:
    """What JobRunner is told of `upstream`: lineage and kept tensors of all, weights of those with `into`."""
    known = config.settings.upstream
    if not known:
        return {}
    runs = {alias: Upstream(run_of(config, one.run), one.keep or ()) for alias, one in known.items()}
    starts = [
        InitFrom(alias, one.into, one.prefix, dict(one.rename or {}), strict=one.strict)
        for alias, one in known.items()
        if one.into or one.prefix or one.rename
    ]
    return {"upstream": runs, "init_from": starts}


def replayed(settings: Settings, runner: RunnerSection) -> dict[str, Any]:
    """What JobRunner is told of `replay`: the model of each phase, made by its class again."""
    if not runner.replay:
        return {}
    names = [phase.name for phase, _ in phases_of(settings, runner)]
    return {"replay": {f"{name}.{MODEL}": Recipe("phase", runner.name, name) for name in names}}


def run_of(config: Config, text: str) -> str:
    """Relative runs begin at the workspace, as all paths of a configuration do."""
    return text if is_url(text) or Path(text).is_absolute() else str(config.workspace / text)
