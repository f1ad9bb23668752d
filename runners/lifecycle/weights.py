"""Stored weights into the models of phases: warm starts, and the epochs that `infer` goes over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.files.blobs.load_into import FileSource, load_into
from torchrelay.checkpoint.files.blobs.reader import open_blob_file
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings
from torchrelay.runners.lifecycle.phase_state import PhaseState
from torchrelay.runners.lifecycle.selection import MODEL, OPTIMIZER, stored_phase


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
