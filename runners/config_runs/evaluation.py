"""Evaluate a phase's model on data: metrics and predictions, during training or for stored epochs.

Each rank writes its predictions of an epoch to a part file in ascending order; rank 0 merges the parts by
index with one row per rank in memory.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.files.load_into import FileSource, load_into
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.load.renaming import LoadResult, misshapen_leaves
from torchrelay.checkpoint.log.view import ranges, whole_epochs
from torchrelay.checkpoint.storage.open import is_url, open_file_system
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.config.schema import RunnerSection, Settings
from torchrelay.jobs.config.section_types import EpochChoice
from torchrelay.jobs.config.tree import hint
from torchrelay.jobs.data.loader import make_batch
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.session import Peers, together, warn
from torchrelay.jobs.task import Task
from torchrelay.metadata.fs import finite
from torchrelay.runners.config_runs.context import PhaseState, StepContext
from torchrelay.runners.config_runs.selection import MODEL, OPTIMIZER, stored_phase, weights_place
from torchrelay.runners.config_runs.user_objects import on_device
from torchrelay.runners.monitoring.console import print_line
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.training.plan import WarmStart


class Tally:
    """Sums of a model's `counts(outputs, batch)` by name; empty for a model without that method.

    After a resume in the middle of a loop it counts only the rest of the loop.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[str, torch.Tensor] = {}
        self._counts = getattr(model, "counts", None)

    def add(self, outputs: Any, batch: Any) -> None:
        """Add a batch; a batch without own samples is ignored."""
        if not callable(self._counts) or not batch.count:
            return
        with torch.no_grad():
            _add_counts(self._sums, self._counts(outputs, batch))

    def metrics(self, peers: Peers) -> dict[str, float]:
        """Return the model's `metrics_of(counts)` over all processes; all ranks call this."""
        if not callable(self._counts):
            return {}
        total: dict[str, torch.Tensor] = {}
        for one in peers.exchange("counts", {name: one.tolist() for name, one in self._sums.items()}):
            _add_counts(total, one)
        found = self._model.metrics_of(total) if total else {}  # type: ignore[operator]
        return {name: float(value) for name, value in found.items()}


def _add_counts(sums: dict[str, torch.Tensor], more: Mapping[str, Any]) -> None:
    for name, count in more.items():
        own = torch.as_tensor(count, dtype=torch.float64).detach()
        sums[name] = sums[name] + own if name in sums else own


Row = dict[str, Any]
FORMATS = ("jsonl", "csv")


def rows_of(predicted: Any, count: int, what: str) -> list[Row]:
    """Return one row per sample, with column `prediction` or the names of a mapping. UsageError."""
    columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
    listed = dict[str, list[Any]]()
    for name, column in columns.items():
        is_tensor = isinstance(column, torch.Tensor)
        if is_tensor:
            values = column.detach().cpu().tolist() if column.dim() else None
        else:
            values = list(column) if isinstance(column, (list, tuple)) else None
        if values is not None:
            listed[name] = values
        if values is None or len(values) != count:
            found = f"a tensor of shape {tuple(column.shape)}" if is_tensor else f"{column!r:.40}"
            raise UsageError(
                f"{what}: predictions of {count} samples must have one row per sample, {name!r} is "
                f"{found}: add a method predict(self, outputs, batch) to the model"
            )
    return [{name: values[at] for name, values in listed.items() if values} for at in range(count)]


def format_of(path: str, wanted: str | None) -> str:
    """Return the requested format, else the one of the file's suffix, else JSON lines."""
    return wanted or ("csv" if path.lower().endswith(".csv") else "jsonl")


class PredictionFile:
    """The file of one profile; all ranks write parts, rank 0 merges them once per epoch."""

    def __init__(self, path: str, form: str, rank: int, ranks: int) -> None:
        self.path, self.form, self.rank, self.ranks = path, form, rank, ranks
        self._system, self._root = _opened(path)
        self._columns: list[str] | None = None
        self._out: Any = None

    def part(self) -> Any:
        """Open this rank's part of an epoch for `write_rows`."""
        return self._system.open(self._part(self.rank), "w", encoding="utf-8", newline="\n")

    def merge(self, constant: Row) -> None:
        """On rank 0, after all parts are closed: append their rows, each with `constant` in front."""
        with ExitStack() as stack:
            opened = (self._system.open(self._part(one), "r", encoding="utf-8") for one in range(self.ranks))
            parts = [stack.enter_context(part) for part in opened]
            for index, row in heapq.merge(*(map(json.loads, part) for part in parts), key=itemgetter(0)):
                self._write({**constant, "index": index, **row})
        for one in range(self.ranks):
            self._system.rm(self._part(one))

    def close(self) -> None:
        """On rank 0: publish the complete file."""
        self._opened_out().close()
        self._system.mv(f"{self._root}.part", self._root)

    def _part(self, rank: int) -> str:
        return f"{self._root}.rank{rank}.part"

    def _opened_out(self) -> Any:
        if self._out is None:
            self._out = self._system.open(f"{self._root}.part", "w", encoding="utf-8", newline="")
        return self._out

    def _write(self, row: Row) -> None:
        out = self._opened_out()
        if self.form == "jsonl":
            out.write(json.dumps(row) + "\n")
            return
        writer = csv.writer(out, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(self._columns)
        cells = [row.get(name) for name in self._columns]
        writer.writerow([json.dumps(one) if isinstance(one, (list, dict)) else one for one in cells])


def _opened(path: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it."""
    if is_url(path):
        return open_file_system(path, "the location of results")
    import fsspec

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return fsspec.filesystem("file"), path


def evaluation(
    context: StepContext, phase: PhaseState, out: PredictionFile | None = None
) -> Callable[[Context], None]:
    """Return a task that iterates over a phase's data once, logs metrics and writes predictions."""

    def evaluate(ctx: Context) -> None:
        phase.model.eval()
        tally, names = Tally(phase.model), set[str]()
        with torch.no_grad(), out.part() if out is not None else nullcontext() as part:
            for batch in ctx.steps(phase.loader, count=False):
                # A rank without a sample computes one that does not count.
                moved = moved_batch(batch, ctx.device)
                outputs = phase.model(moved)
                tally.add(outputs, moved)
                values = metrics_of(phase, outputs, moved)
                if callable(loss := getattr(phase.model, "loss", None)):
                    values = {"loss": loss(outputs, moved), **values}
                weight = phase.weight(batch.count, ctx.world_size)
                names.update(values)
                for name, value in values.items():
                    if phase.logs(name):
                        ctx.log(f"{phase.prefix}{name}", value, weight=weight)
                if phase.metrics is None:
                    ctx.log(f"{phase.prefix}samples", weight, reduce="sum")
                if part is not None and batch.count:
                    write_rows(phase, batch, outputs, part)
        names.update(log_tally(phase, ctx, tally))
        absent = [name for name in phase.metrics or () if name not in names]
        if absent:
            raise UsageError(
                f"phase.{phase.name}.validation.metrics: the model has no metric `{absent[0]}`; "
                f"{hint(absent[0], sorted(names))}"
            )

    return evaluate


def write_rows(phase: PhaseState, batch: Any, outputs: Any, part: Any) -> None:
    """Write one row per sample: the result of the model's `predict`, or its outputs without that method."""
    predict = getattr(phase.model, "predict", None)
    predicted = predict(outputs, batch) if callable(predict) else outputs
    rows = rows_of(predicted, batch.count, f"phase {phase.name}")
    for index, row in zip(batch.indices.tolist(), rows, strict=True):
        part.write(json.dumps([index, row]) + "\n")


def log_tally(phase: PhaseState, ctx: Context, tally: Tally) -> Iterable[str]:
    """Log the metrics of a loop's counts over all ranks; returns their names."""
    found = tally.metrics(ctx.session.peers)
    for name, value in found.items():
        if phase.logs(name):
            ctx.log(f"{phase.prefix}{name}", value)
    return found


def metrics_of(phase: PhaseState, outputs: Any, batch: Any) -> dict[str, Any]:
    """Return the batch means of the model's `metrics(outputs, batch)`; empty without that method."""
    measure = getattr(phase.model, "metrics", None)
    if not callable(measure):
        return {}
    with torch.no_grad():
        return dict(measure(outputs, batch))


def moved_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device."""
    return make_batch(on_device(batch.data, device), weight=batch.weight, indices=batch.indices)


def load_weights(
    phase: PhaseState, settings: Settings, runner: RunnerSection, where: str, epoch: int | str = "last"
) -> WarmStart:
    """Load and verify a phase's model in place, from an epoch of a run or a file of `save_blobs`.

    The runner's `init_prefix`, `init_rename`, `init_strict` and `init_optimizer` select the content; without
    `init_strict` a warning names what is skipped. Raises UsageError if nothing there matches the phase,
    BlobError if it does not fit.
    """
    stored: Mapping[str, Any]
    leaves: Iterable[Any]
    load: Callable[..., LoadResult]
    if Path(where).is_file():
        file, name = open_blob_file(where), where
        stored, leaves, load = FileSource(file).kinds(), file.specs.values(), partial(load_into, where)
    else:
        checkpoint = open_checkpoint(where, epoch=epoch)
        stored, leaves, load = checkpoint.blobs, checkpoint.leaves, checkpoint.load_saved
        name = f"{where}, epoch {checkpoint.epoch}"
    source, target = runner.init_prefix, f"{phase.name}.{MODEL}"
    if source is None:
        found = stored_phase(settings, phase.keys, list(stored))
        if found is None:
            there = ", ".join(name for name in stored if name != "rng") or "nothing"
            raise UsageError(
                f"{where} has no model for phase {phase.name!r}; it has {there}: set `init_prefix`"
            )
        source = f"{found}.{MODEL}"
    objects: dict[str, Any] = {target: phase.model}
    if runner.init_optimizer and phase.optimizer is not None:
        if source != target:
            raise UsageError(
                f"runner.{runner.name}.init_optimizer: the weights come from {source}, but optimizer state "
                f"needs the same names: name the phase as there"
            )
        objects[f"{phase.name}.{OPTIMIZER}"] = phase.optimizer
    rename = {
        f"{source}.{old.rstrip('.')}": f"{target}.{new.rstrip('.')}".rstrip(".")
        for old, new in (runner.init_rename or {}).items()
    }
    if source != target:
        rename[source] = target
    misshapen = () if runner.init_strict else misshapen_leaves(objects, leaves, rename)
    result = load(objects, rename=rename or None, strict=runner.init_strict, exclude=misshapen)
    if not result.loaded:
        raise UsageError(f"no leaf of {source} in {name} fits {target}, so nothing would be loaded")
    taken = WarmStart(name, result.loaded, result.missing, result.unexpected, misshapen)
    if result.missing or result.unexpected or misshapen:
        warn(f"runner.{runner.name}: {taken}", stacklevel=2)
    return taken


def chosen_epochs(runner: RunnerSection, where: str) -> tuple[list[int], str | None]:
    """Return the selected epochs, ascending, and a warning for those of a range that do not exist.

    Raises UsageError if the run is missing, UnknownEpochError if listed epochs do not exist or none is left.
    """
    if not is_url(where) and not Path(where).exists():
        raise UsageError(f"runner.{runner.name}: {where} does not exist: train first (`mode` sets the order)")
    choice, (_, epoch) = runner.infer_epochs, weights_place(runner)
    if isinstance(epoch, int):
        choice = EpochChoice("numbers", (epoch,))
    if choice.kind in ("latest", "best") or isinstance(epoch, str):
        word = epoch or ("last" if choice.kind == "latest" else "best")
        return [open_checkpoint(where, word).epoch], None
    there = [one.position.epoch for one in whole_epochs(read_log(place_of(where)), None) if one.healthy]
    chosen, absent = choice.chosen(there), choice.absent(there)
    said = f"{where} has no epoch {ranges(absent)}; it has {ranges(there) or 'none'}" if absent else None
    if said and (choice.listed or not chosen):
        raise UnknownEpochError(f"runner.{runner.name}: {said}")
    if not chosen:
        raise UnknownEpochError(
            f"runner.{runner.name}: {where} has none of the selected epochs; it has {ranges(there)}"
        )
    return sorted(chosen), said


def infer_epochs(context: StepContext) -> list[Row]:
    """Evaluate every epoch of the context; returns one row each, which rank 0 prints and writes."""
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

            def load(epoch: int = epoch) -> None:
                for phase in context.phases.values():
                    load_weights(phase, context.settings, runner, context.run_dir, epoch)

            together(peers, f"load epoch {epoch}", load)
            for phase in context.phases.values():
                group = TaskGroup(name=f"infer {phase.name}")
                Task(evaluation(context, phase, out), group=group, name=phase.name)
                session.run(group)
                if out is not None and peers.rank == 0:
                    out.merge({"epoch": epoch, **({"phase": phase.name} if len(context.phases) > 1 else {})})
                peers.exchange("predictions merged", None)
            measured = session.reduce_metrics()
            rows.append({"runner": context.runner_name, "epoch": epoch, **measured})
            if peers.rank == 0:
                text = ", ".join(f"{name} {value:.6g}" for name, value in sorted(measured.items()))
                print_line(f"{context.runner_name} epoch {epoch}: {text}")
                if runner.metrics_path is not None:
                    _write_metrics(runner.metrics_path, rows)
        if out is not None and peers.rank == 0:
            out.close()
    finally:
        session.end()
    return rows


def _write_metrics(path: str, rows: list[Row]) -> None:
    system, root = _opened(path)
    with system.open(root, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            named = {name: finite(one) if isinstance(one, float) else one for name, one in row.items()}
            file.write(json.dumps(named) + "\n")
