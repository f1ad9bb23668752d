"""Derive from a configuration the files, phases, device and JobRunner options of a profile."""

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
from torchrelay.jobs.config.schema import CLUSTER_TRAIN, LOCAL_TRAIN, Dataset, Phase, RunnerSection, Settings
from torchrelay.jobs.config.section_types import ClassPath, split_weights
from torchrelay.metadata.code.capture import Given
from torchrelay.metadata.code.snapshot import Sources
from torchrelay.runners.training.plan import Recipe

if TYPE_CHECKING:
    import torch


MODEL, OPTIMIZER, LOADER, SCHEDULER = "model", "optimizer", "loader", "scheduler"
"""Suffixes of the blob names of a phase."""


def phases_of(settings: Settings, runner: RunnerSection) -> list[tuple[Phase, Dataset | None]]:
    """Return the phases of a profile in order, each with its dataset: the only one if it names none."""
    known, data = {one.name: one for one in settings.phase}, {one.name: one for one in settings.dataset}
    only = settings.dataset[0] if len(settings.dataset) == 1 else None
    names = list(known) if runner.phases is None else runner.phases
    phases = [known[name] for name in names]
    return [(one, only if one.dataset_name is None else data[one.dataset_name]) for one in phases]


def validation_dataset(settings: Settings, phase: Phase) -> Dataset | None:
    """Return the dataset that evaluates a phase during training."""
    if phase.validation is None:
        return None
    return next(one for one in settings.dataset if one.name == phase.validation.dataset_name)


def datasets_of(settings: Settings, runner: RunnerSection) -> list[Dataset]:
    """Return all datasets of a profile, each once."""
    found: dict[str, Dataset] = {}
    for phase, dataset in phases_of(settings, runner):
        more = None if runner.infers else validation_dataset(settings, phase)
        found |= {one.name: one for one in (dataset, more) if one is not None}
    return list(found.values())


def reader_path(dataset: Dataset) -> ClassPath | None:
    """Return the class that reads a dataset."""
    path, name = dataset.data_converter, dataset.reader_class_name
    return path if path is None or name is None else replace(path, name=name)


def optimizer_path(settings: Settings) -> ClassPath | None:
    """Return the optimizer's class unless it is one of torch.optim."""
    optimizer = settings.hyper_parameters.optimizer
    if optimizer is None or ":" not in optimizer.kind:
        return None
    module, _, name = optimizer.kind.rpartition(":")
    return ClassPath(optimizer.kind, name, module=module)


def run_directory_of(settings: Settings, runner: RunnerSection) -> str:
    """Return the run directory of a training profile."""
    if runner.save_checkpoint_path is not None:
        return runner.save_checkpoint_path
    return "/".join(part for part in (settings.run_dir, settings.name, runner.name) if part)


def weights_place(runner: RunnerSection) -> tuple[str | None, int | str | None]:
    """Split `init_model_path` into run or file and epoch: `RUN@7`, `RUN@best`, `RUN/7`."""
    return (None, None) if runner.init_model_path is None else split_weights(runner.init_model_path)


def epochs_place(settings: Settings, runner: RunnerSection) -> str:
    """Return the run that `infer` evaluates: `init_model_path`, else the run of the only training profile.

    Only profiles of the mode count, or those of the file if none in the mode trains.
    """
    where, _ = weights_place(runner)
    if where is not None:
        return where
    trained = settings.training()
    if len(trained) == 1:
        return run_directory_of(settings, trained[0])
    raise UsageError(
        f"runner.{runner.name}: `init_model_path` is missing, and {len(trained)} runners train: set it to "
        "the run to evaluate"
    )


def is_of_training(settings: Settings, runner: RunnerSection) -> bool:
    """Return True if `infer` evaluates a run that a profile of this configuration trains."""
    where, _ = weights_place(runner)
    return where is None or where in [
        run_directory_of(settings, one) for one in settings.runner if not one.infers
    ]


def stored_phase(settings: Settings, phase: Phase, stored: Collection[str]) -> str | None:
    """Return the stored phase that a phase loads; `stored` holds blob names.

    Order: the same name, the only other phase of the same model class, the only phase there is; else None.
    """
    there = [name.removesuffix(f".{MODEL}") for name in stored if name.endswith(f".{MODEL}")]
    if phase.name in there:
        return phase.name
    alike = [one.name for one in settings.phase if one.model == phase.model and one.name in there]
    if len(alike) == 1:
        return alike[0]
    return there[0] if len(there) == 1 else None


def keeping(runner: RunnerSection) -> dict[str, Any]:
    """Return JobRunner's retention options. Every epoch is saved; an interval thins the kept ones."""
    interval, every, last = runner.save_checkpoint_interval, runner.keep_every, runner.keep_last
    best = None if runner.keep_best is None else (runner.keep_best.metric, runner.keep_best.mode)
    if interval == 1 and every is None and last is None:
        return {"best": best}
    if interval > 1:
        every = interval if every is None else math.lcm(interval, every)
    kept: Mapping[str, Any] = {"keep_every": every, "keep_last": last or 1, "keep_best": best}
    return {"best": best, **{name: one for name, one in kept.items() if one is not None}}


def device_of(runner: RunnerSection, local_rank: int) -> torch.device:
    """Return the device of a process; raises UsageError if it is not available.

    `auto` is the GPU of the local rank if there is one. `selected_gpus` are assigned in order by local rank.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = f"runner.{runner.name}"
    if runner.device == "cpu" or (runner.device == "auto" and not count and runner.selected_gpus is None):
        return torch.device("cpu")
    if not count:
        key = "selected_gpus" if runner.selected_gpus is not None else f"device: {runner.device}"
        raise UsageError(f"{own} has `{key}`, but this machine has no visible GPU: write `device: auto`")
    chosen = tuple(range(count)) if runner.selected_gpus is None else runner.selected_gpus
    beyond = [one for one in chosen if one >= count]
    if beyond:
        raise UsageError(f"{own}.selected_gpus has GPU {beyond[0]}, but this machine has 0 to {count - 1}")
    if local_rank >= len(chosen):
        raise UsageError(
            f"{own} may use {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}, but more processes were "
            f"started on this machine (local rank {local_rank}): start one per GPU"
        )
    return torch.device("cuda", chosen[local_rank])


def check_launch(runner: RunnerSection, *, launched: bool, world_size: int) -> None:
    """Raise UsageError if the class of a profile contradicts the way it was launched."""
    own = f"runner.{runner.name}"
    if runner.kind == CLUSTER_TRAIN and not launched:
        raise UsageError(
            f"{own}.class is {CLUSTER_TRAIN}, which needs a launcher: torchrun ... -m torchrelay run -m "
            f"config.yaml; or write `train` for one process, `{LOCAL_TRAIN}` for several on this machine"
        )
    if runner.kind == LOCAL_TRAIN and launched and world_size != runner.worker_num:
        raise UsageError(
            f"{own}.class is {LOCAL_TRAIN}, which starts {runner.worker_num} processes itself, but a "
            f"launcher has started {world_size}: write `train`"
        )
    if runner.device == "cpu" and runner.selected_gpus is not None:
        raise UsageError(
            f"{own}: `selected_gpus` and `device: cpu` contradict each other: remove one of them"
        )


_FILE = "config.yaml"
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def file_within(text: str) -> str:
    """Return the path itself, or for a directory its `config.yaml`. Imports nothing, and never raises."""
    with suppress(OSError, ValueError):
        return str(Path(text) / _FILE) if text and Path(text).is_dir() else text
    return text


def config_file(text: str) -> str:
    """Return the path itself, or for a directory or an importable package its `config.yaml`.

    A package is searched below the working directory, then on Python's path. Parent packages of a dotted name
    are imported. Anything else is returned unchanged, so that reading it reports the error.
    """
    if (found := file_within(text)) != text:
        return found
    if Path(text).exists() or not _PACKAGE.fullmatch(text):
        return text
    here = Path(*text.split("."), _FILE)  # the working directory is not on the path of a console script
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
"""Keys of runners that name outputs."""


def source_of(config: Config) -> Sources:
    """Return the source files of the workspace, without the config file, data and outputs."""
    settings, workspace = config.settings, config.workspace
    paths = [config.name, settings.run_dir]
    paths += [path for one in settings.dataset for path in one.data_path]
    paths += [path for one in settings.runner for key in _WRITTEN if (path := getattr(one, key))]
    paths += [path for one in settings.runner if (path := weights_place(one)[0])]
    inside = [Path(os.path.abspath(path)) for path in paths if not is_url(path)]  # noqa: PTH100
    names = [one.relative_to(workspace).as_posix() for one in inside if workspace in one.parents]
    # Escaped as in .gitignore.
    left_out = ["/" + "".join(f"\\{one}" if one in "*?[]!# \\" else one for one in name) for name in names]
    return Sources([workspace], exclude=left_out)


def recorded(config: Config) -> Given:
    """Return the original file, the resolved configuration and the overrides, for `config/` of the run."""
    quoted = [one.replace("'", "''") for one in config.overrides]  # as YAML does in single quotes
    overrides = "".join(f"- '{one}'\n" for one in quoted) or "[]\n"
    files = {
        "source.yaml": config.source,
        "resolved.yaml": config.resolved_text().encode(),
        "overrides.yaml": overrides.encode(),
    }
    return Given(files, config.id, config.overrides)


def built_on(config: Config) -> dict[str, Any]:
    """Return JobRunner's `upstream` options: lineage, kept tensors, and weights of those with `into`."""
    known = config.settings.upstream
    if not known:
        return {}
    from torchrelay.runners.training.extras.upstream import InitFrom, Upstream  # with torch

    runs = {alias: Upstream(run_of(config, one.run), one.keep or ()) for alias, one in known.items()}
    starts = [
        InitFrom(alias, one.into, one.prefix, dict(one.rename or {}), strict=one.strict)
        for alias, one in known.items()
        if one.into or one.prefix or one.rename
    ]
    return {"upstream": runs, "init_from": starts}


def replayed(settings: Settings, runner: RunnerSection) -> dict[str, Any]:
    """Return JobRunner's `replay` option: the model of each phase, rebuilt by its class."""
    if not runner.replay:
        return {}
    names = [phase.name for phase, _ in phases_of(settings, runner)]
    return {"replay": {f"{name}.{MODEL}": Recipe("phase", runner.name, name) for name in names}}


def run_of(config: Config, text: str) -> str:
    """Resolve a relative run against the workspace, as for all paths of a configuration."""
    return text if is_url(text) or Path(text).is_absolute() else str(config.workspace / text)
