"""A phase's model, measured on data: while it trains, and of stored epochs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.config.tree import hint
from torchrelay.jobs.data.fetch import make_batch
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.lifecycle.phase_state import PhaseState
from torchrelay.runners.lifecycle.predictions import PredictionFile, put, rows_of
from torchrelay.runners.lifecycle.tally import Tally
from torchrelay.runners.lifecycle.user_objects import on_device
from torchrelay.runners.session.context import Context


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
