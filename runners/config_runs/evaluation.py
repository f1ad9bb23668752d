"""A phase's model, measured on data: means, counts, and predictions in the order of the input.

Each rank writes what it predicted of an epoch to a part beside the file, in ascending order; rank 0 merges
them by index. Memory holds one row per rank.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.storage.urls import is_url, open_file_system
from torchrelay.errors import UsageError
from torchrelay.jobs.config.tree import hint
from torchrelay.jobs.data.fetch import make_batch
from torchrelay.jobs.session import Peers
from torchrelay.runners.config_runs.context import PhaseState, StepContext
from torchrelay.runners.config_runs.user_objects import on_device
from torchrelay.runners.session.context import Context


class Tally:
    """Sums of what a model's `counts(outputs, batch)` gives, by name; nothing for a model without it.

    It holds what was added since it was made: a loop that a start goes on with in its middle counts the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[str, torch.Tensor] = {}
        self._counts = getattr(model, "counts", None)

    def add(self, outputs: Any, batch: Any) -> None:
        """Count a batch; one without samples of its own is left out."""
        if not callable(self._counts) or not batch.count:
            return
        with torch.no_grad():
            for name, count in self._counts(outputs, batch).items():
                own = torch.as_tensor(count).detach().to(torch.float64)
                self._sums[name] = self._sums[name] + own if name in self._sums else own

    def metrics(self, peers: Peers) -> dict[str, float]:
        """What the model's `metrics_of(counts)` makes of the sums over all processes; all call this."""
        if not callable(self._counts):
            return {}
        told = peers.exchange("counts", {name: one.tolist() for name, one in self._sums.items()})
        total: dict[str, torch.Tensor] = {}
        for one in told:
            for name, count in one.items():
                own = torch.tensor(count, dtype=torch.float64)
                total[name] = total[name] + own if name in total else own
        found = self._model.metrics_of(total) if total else {}  # type: ignore[operator]
        return {name: float(value) for name, value in found.items()}


Row = dict[str, Any]
FORMATS = ("jsonl", "csv")


def rows_of(predicted: Any, count: int, what: str) -> list[Row]:
    """A row per sample of what a model predicted: of a tensor `prediction`, of a mapping its names.

    Raises UsageError where there is not one per sample.
    """
    columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
    listed = {name: _listed(value) for name, value in columns.items()}
    for name, values in listed.items():
        if values is None or len(values) != count:
            raise UsageError(
                f"{what}: predictions of {count} samples must be tensors with a row for each, {name!r} is "
                f"{_described(columns[name])}: give the model a method predict(self, outputs, batch)"
            )
    return [{name: values[at] for name, values in listed.items() if values} for at in range(count)]


def format_of(path: str, wanted: str | None) -> str:
    """The format that was asked for, else that of the name's ending, else JSON lines."""
    return wanted or ("csv" if path.lower().endswith(".csv") else "jsonl")


class PredictionFile:
    """The file of one profile; rank 0 writes it, all ranks write parts. `merge` is called per epoch."""

    def __init__(self, path: str, form: str, rank: int, ranks: int) -> None:
        self.path, self.form, self.rank, self.ranks = path, form, rank, ranks
        self._system, self._root = _opened(path)
        self._columns: list[str] | None = None
        self._out: Any = None

    def part(self) -> Any:
        """Open this rank's part of an epoch; write rows to it by `put`."""
        return self._system.open(self._part(self.rank), "w", encoding="utf-8", newline="\n")

    def merge(self, constant: Row) -> None:
        """On rank 0, when all parts are closed: append their rows, `constant` in front of each."""
        with _all_of(
            [self._system.open(self._part(one), "r", encoding="utf-8") for one in range(self.ranks)]
        ) as parts:
            for _, row in heapq.merge(*(map(_decoded, part) for part in parts), key=itemgetter(0)):
                self._write({**constant, **row})
        for one in range(self.ranks):
            self._system.rm(self._part(one))

    def close(self) -> None:
        """On rank 0: the file appears whole."""
        if self._out is None:
            self._open()
        self._out.close()
        self._system.mv(f"{self._root}.part", self._root)

    def _part(self, rank: int) -> str:
        return f"{self._root}.rank{rank}.part"

    def _open(self) -> None:
        self._out = self._system.open(f"{self._root}.part", "w", encoding="utf-8", newline="")

    def _write(self, row: Row) -> None:
        if self._out is None:
            self._open()
        if self.form == "jsonl":
            self._out.write(json.dumps(row) + "\n")
            return
        writer = csv.writer(self._out, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(self._columns)
        writer.writerow([_cell(row.get(name)) for name in self._columns])


class _all_of:  # noqa: N801 - a context manager
    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files

    def __enter__(self) -> Sequence[Any]:
        return self._files

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def put(part: Any, index: int, row: Row) -> None:
    """Write a row of a part."""
    part.write(json.dumps([index, row]) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a small file or URL whole."""
    system, root = _opened(path)
    with system.open(root, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _opened(path: str) -> tuple[Any, str]:
    if is_url(path):
        return open_file_system(path, "the place of results")
    import fsspec

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return fsspec.filesystem("file"), path


def _decoded(line: str) -> tuple[int, Row]:
    index, row = json.loads(line)
    return index, {"index": index, **row}


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist() if value.dim() else None
    return list(value) if isinstance(value, (list, tuple)) else None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.40}"


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def evaluation(
    context: StepContext, phase: PhaseState, out: PredictionFile | None = None
) -> Callable[[Context], None]:
    """A task that goes over a phase's data once: logs metrics, and writes what the model predicts."""

    def evaluate(ctx: Context) -> None:
        phase.model.eval()
        tally, names = Tally(phase.model), set[str]()
        with torch.no_grad(), out.part() if out is not None else nullcontext() as part:
            for batch in ctx.steps(phase.loader, count=False):
                outputs = _measured(phase, ctx, batch, tally, names)
                if part is not None and batch.count:
                    _write(context, phase, batch, outputs, part)
        names.update(log_tally(phase, ctx, tally))
        _check_logged(phase, names)

    return evaluate


def _measured(phase: PhaseState, ctx: Context, batch: Any, tally: Tally, names: set[str]) -> Any:
    """What the model gives; a rank without a sample in a step computes one that counts for nothing.

    `names` gets those of all metrics.
    """
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
    return outputs


def _write(context: StepContext, phase: PhaseState, batch: Any, outputs: Any, part: Any) -> None:
    predict = getattr(phase.model, "predict", None)
    predicted = predict(outputs, batch) if callable(predict) else outputs
    rows = rows_of(predicted, batch.count, f"phase {phase.name}")
    for index, row in zip(batch.indices.tolist(), rows, strict=True):
        put(part, index, row)


def _check_logged(phase: PhaseState, names: Collection[str]) -> None:
    """Refuse metrics that were asked for and that the model does not give; raises UsageError."""
    absent = [name for name in phase.metrics or () if name not in names]
    if absent:
        raise UsageError(
            f"phase.{phase.name}.validation.metrics: the model gives no `{absent[0]}`; "
            f"{hint(absent[0], sorted(names))}"
        )


def log_tally(phase: PhaseState, ctx: Context, tally: Tally) -> Iterable[str]:
    """Log what the counts of a loop come to, over all ranks; returns the names."""
    found = tally.metrics(ctx.session.peers)
    for name, value in found.items():
        if phase.logs(name):
            ctx.log(f"{phase.prefix}{name}", value)
    return found


def metrics_of(phase: PhaseState, outputs: Any, batch: Any) -> dict[str, Any]:
    """What the model's `metrics(outputs, batch)` gives: means over the batch, by name; nothing without it."""
    measure = getattr(phase.model, "metrics", None)
    if not callable(measure):
        return {}
    with torch.no_grad():
        return dict(measure(outputs, batch))


def moved_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return make_batch(on_device(batch.data, device), weight=batch.weight, indices=batch.indices)
