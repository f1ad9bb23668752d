"""What a profile writes out while it trains: weights of the models alone, and ONNX files.

A file of `export_checkpoint` per phase, `<path>/<epoch>/<phase>.safetensors`, with the names of the model's
own `state_dict`. It is made of the committed epoch, never of live objects, so it is what that epoch holds. A
handler of the run, hence told again of epochs that a crash kept from it; an export that fails is a warning,
the epoch is saved all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.files.interop import export_checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.session import warn
from torchrelay.metadata.handlers import SeveralHandlers
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import StepContext
from torchrelay.runners.config_runs.selection import MODEL, phases_of, reader_path
from torchrelay.runners.config_runs.user_objects import made, made_dataset
from torchrelay.runners.remote_runs.names import is_remote


@dataclass(frozen=True)
class InferenceExport:
    """A metadata handler that writes weights of epochs that `every` divides; `finish` of any epoch."""

    run_dir: str
    path: Path
    phases: Sequence[str]
    every: int

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Nothing: the run directory is known."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """As the user wishes; it is never asked, because it decides nothing."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Export an epoch that was saved, if it is one of these. Raises what the export raises."""
        if epoch and epoch % self.every == 0:
            self.export(epoch)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Nothing."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Saves need nothing of this."""
        return True

    def export(self, epoch: int) -> None:
        """Write the models of an epoch, over what an earlier branch left there."""
        for phase in self.phases:
            target = self.path / str(epoch) / f"{phase}.safetensors"
            target.parent.mkdir(parents=True, exist_ok=True)
            model = f"{phase}.{MODEL}"
            export_checkpoint(self.run_dir, target, epoch, blobs=[model], prefix=f"{model}.", overwrite=True)

    def finish(self, epoch: int) -> None:
        """Export the last epoch, unless that was done: its interval may not divide it."""
        if epoch and epoch % self.every:
            self.export(epoch)


def local_beside(given: str | None, run_dir: str, name: str, key: str) -> Path:
    """A directory for files of a run that are no epochs: the given one, else a name in the run directory.

    Raises UsageError for a run in a store: such files are written by path.
    """
    if given is None and is_remote(run_dir):
        raise UsageError(
            f"`{key}` missing: the run is in a store, {run_dir}, and these files need a directory"
        )
    return Path(given or f"{run_dir}/{name}")


def inference_export(runner: RunnerKeys, run_dir: str, phases: Sequence[str]) -> InferenceExport | None:
    """What the keys of a profile ask for; None where they do not. Every epoch unless an interval is given."""
    if runner.save_inference_path is None and runner.save_inference_interval is None:
        return None
    path = local_beside(runner.save_inference_path, run_dir, "inference", "save_inference_path")
    begun = is_remote(run_dir) or Path(run_dir, "checkpoints", "log").exists()
    if runner.save_inference_path is not None and not begun and any(path.glob("*/*.safetensors")):
        warn(
            f"runner.{runner.name}.save_inference_path: {path} has files of an earlier run, and this run "
            "replaces them; leave the key out to have them in each run"
        )
    return InferenceExport(run_dir, path, phases, runner.save_inference_interval or 1)


def with_export(options: Mapping[str, Any], export: InferenceExport | None) -> dict[str, Any]:
    """JobRunner's options with this handler, beside one that is there."""
    if export is None:
        return dict(options)
    there = options.get("metadata_handler")
    return {**options, "metadata_handler": export if there is None else SeveralHandlers([there, export])}


def first_batch(context: StepContext, phase: str) -> tuple[Any]:
    """The arguments of a call; raises UsageError where the phase has no data."""
    pairs = phases_of(context.settings, context.runner)
    dataset = next(found for one, found in pairs if one.name == phase)
    path = None if dataset is None else reader_path(dataset)
    if dataset is None or path is None:
        raise UsageError(f"phase.{phase} has no data to take example inputs from: give --input")
    reader = made(context.classes.of(path), dataset)
    collate = getattr(reader, "collate", None)
    batches = EpochLoader(made_dataset(reader, dataset), dataset.batch_size, shuffle=False, collate=collate)
    return (next(iter(batches)).data,)


def with_onnx(options: Mapping[str, Any], context: StepContext) -> dict[str, Any]:
    """JobRunner's options with an `OnnxExport` for each phase, beside those that are there.

    A file is called `model` where there is one phase, else as the phase; its inputs are those of a batch that
    answers depend on. Raises UsageError where the extra `onnx` is missing.
    """
    keys = context.runner.onnx
    if keys is None:
        return dict(options)
    from torchrelay.runners.training.extras.onnx_export import OnnxExport

    alone = len(context.phases) == 1
    made = [
        OnnxExport(
            phase.model,
            partial(first_batch, context, name),
            keys.every,
            keys.best,
            name="model" if alone else name,
            options={"drop_unused": True},
        )
        for name, phase in context.phases.items()
    ]
    return {**options, "exports": [*options.get("exports", ()), *made]}
