"""The first samples of a phase's data, as its model is called with them."""

from __future__ import annotations

from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.lifecycle.selection import phases_of, reader_path
from torchrelay.runners.lifecycle.user_objects import made, made_dataset


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
