"""Stored epochs, evaluated one after another, and stored weights into the models of phases."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.files.load_into import FileSource, load_into
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.log.view import ranges, whole_epochs
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.section_types import EpochChoice
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.session import decide, together
from torchrelay.jobs.task import Task
from torchrelay.runners.config_runs.context import PhaseState, StepContext
from torchrelay.runners.config_runs.evaluation import PredictionFile, evaluation, format_of, write_text
from torchrelay.runners.config_runs.selection import MODEL, OPTIMIZER, stored_phase, weights_place
from torchrelay.runners.session.run_state import RunState


def load_weights(
    phase: PhaseState, settings: Settings, runner: RunnerKeys, where: str, epoch: int | str = "last"
) -> None:
    """Load a phase's model from an epoch of a run, or from a file of `save_blobs`, in place and verified.

    `init_prefix`, `init_rename`, `init_strict` and `init_optimizer` of the runner say what of it. Raises
    UsageError where nothing there belongs to the phase, BlobError where it does not fit.
    """
    if Path(where).is_file():
        names: Collection[str] = FileSource(open_blob_file(where)).kinds()
        source = _source(phase, settings, runner, where, names)
        objects, rename = _wanted(phase, runner, source)
        load_into(where, objects, rename=rename, strict=runner.init_strict)
        return
    checkpoint = open_checkpoint(where, epoch=epoch)
    source = _source(phase, settings, runner, where, list(checkpoint.blobs))
    objects, rename = _wanted(phase, runner, source)
    checkpoint.load_saved(objects, rename=rename, strict=runner.init_strict)


def _source(
    phase: PhaseState, settings: Settings, runner: RunnerKeys, where: str, stored: Collection[str]
) -> str:
    """The dotted name below which the model lies there."""
    if runner.init_prefix is not None:
        return runner.init_prefix
    found = stored_phase(settings, phase.keys, stored)
    if found is None:
        there = ", ".join(name for name in stored if name != "rng") or "nothing"
        raise UsageError(
            f"{where} has no model for phase {phase.name!r}; it has {there}: call the phase as it was "
            "trained, or give `init_prefix`"
        )
    return f"{found}.{MODEL}"


def _wanted(
    phase: PhaseState, runner: RunnerKeys, source: str
) -> tuple[dict[str, Any], Mapping[str, str] | None]:
    """What is loaded, and how stored names become those of the phase."""
    target = f"{phase.name}.{MODEL}"
    objects: dict[str, Any] = {target: phase.model}
    if runner.init_optimizer and phase.optimizer is not None:
        if source != target:
            raise UsageError(
                f"runner.{runner.name}.init_optimizer: the weights are those of {source}, and an optimizer's "
                f"state goes by the names of its weights: call the phase as there, or leave the key out"
            )
        objects[f"{phase.name}.{OPTIMIZER}"] = phase.optimizer
    rename = {
        f"{source}.{old.rstrip('.')}": f"{target}.{new.rstrip('.')}".rstrip(".")
        for old, new in (runner.init_rename or {}).items()
    }
    if source != target:
        rename[source] = target
    return objects, rename or None


Row = dict[str, Any]


def chosen_epochs(runner: RunnerKeys, where: str) -> tuple[list[int], str | None]:
    """The epochs that are meant, ascending, and what has to be said of it.

    Raises UsageError where no run is, UnknownEpochError naming epochs that were listed and are not there, or
    where none is left. Of a range what is not there is only said.
    """
    if not is_url(where) and not Path(where).exists():
        raise UsageError(
            f"runner.{runner.name}: {where} is not there: train first (`mode` is the order), or say by "
            "`init_model_path` where epochs are"
        )
    choice, (_, behind) = runner.infer_epochs, weights_place(runner)
    if isinstance(behind, int):
        choice = EpochChoice("numbers", (behind,))
    if choice.kind in ("latest", "best") or isinstance(behind, str):
        word = behind or ("last" if choice.kind == "latest" else "best")
        return [open_checkpoint(where, word).epoch], None
    there = [one.position.epoch for one in whole_epochs(read_log(place_of(where)), None) if one.healthy]
    chosen, absent = choice.chosen(there), choice.absent(there)
    said = f"{where} has no epoch {ranges(absent)}; there are {ranges(there) or 'none'}" if absent else None
    if said and (choice.listed or not chosen):
        raise UnknownEpochError(f"runner.{runner.name}: {said}")
    if not chosen:
        raise UnknownEpochError(
            f"runner.{runner.name}: none of the epochs meant is in {where}; there are {ranges(there)}"
        )
    return sorted(chosen), said


def agreed_epochs(context: StepContext) -> tuple[int, ...]:
    """The epochs of a profile, chosen once for all ranks."""
    peers = context.session.peers
    found, said = decide(peers, "epochs", lambda: list(chosen_epochs(context.runner, context.run_dir)))
    if said and peers.rank == 0:
        print(f"{context.runner_name}: {said}", flush=True)
    return tuple(found)


def infer_epochs(context: StepContext) -> list[Row]:
    """Evaluate every epoch of the context; returns a row for each, which rank 0 also prints and writes."""
    session, runner = context.session, context.runner
    peers, rows = session.peers, list[Row]()
    state = RunState(seed=context.settings.seed)
    out = None
    if runner.predictions_path is not None:
        form = format_of(runner.predictions_path, runner.predictions_format)
        out = PredictionFile(runner.predictions_path, form, peers.rank, peers.size)
    session.begin(state)
    try:
        for epoch in context.epochs:
            state.begin_epoch(epoch)
            rows.append(_one_epoch(context, epoch, out))
            if peers.rank == 0:
                _tell(context, rows)
        if out is not None and peers.rank == 0:
            out.close()
    finally:
        session.end()
    return rows


def _one_epoch(context: StepContext, epoch: int, out: PredictionFile | None) -> Row:
    peers = context.session.peers
    together(peers, f"load epoch {epoch}", lambda: _load(context, epoch))
    several = len(context.phases) > 1
    for phase in context.phases.values():
        group = TaskGroup(name=f"infer {phase.name}")
        Task(evaluation(context, phase, out), group=group, name=phase.name)
        context.session.run(group)
        if out is not None and peers.rank == 0:
            out.merge({"epoch": epoch, **({"phase": phase.name} if several else {})})
        peers.exchange("predictions merged", None)
    return {"runner": context.runner_name, "epoch": epoch, **context.session.reduce_metrics()}


def _load(context: StepContext, epoch: int) -> None:
    for phase in context.phases.values():
        load_weights(phase, context.settings, context.runner, context.run_dir, epoch)


def _tell(context: StepContext, rows: list[Row]) -> None:
    shown = {name: value for name, value in rows[-1].items() if name not in ("runner", "epoch")}
    text = ", ".join(f"{name} {value:.6g}" for name, value in sorted(shown.items()))
    print(f"{context.runner_name} epoch {rows[-1]['epoch']}: {text}", flush=True)
    if context.runner.metrics_path is not None:
        lines = "".join(json.dumps(_finite(row)) + "\n" for row in rows)
        write_text(context.runner.metrics_path, lines)


def _finite(row: Row) -> Row:
    """JSON has no NaN and no infinity: they become texts."""
    odd = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: str(value) if name in odd else value for name, value in row.items()}
