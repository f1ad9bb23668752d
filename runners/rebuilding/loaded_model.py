"""The model of an epoch of a run, made again and filled with the epoch's weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.storage.open import FILE
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.rebuilding.model_of_run import Made, rebuilt

Where = str | os.PathLike[str]


@dataclass(frozen=True)
class LoadedModel:
    """A module with the weights of an epoch; `run` is None where there are checkpoints alone."""

    module: nn.Module
    opened: Checkpoint
    run: Path | None
    of_batches: bool
    inputs: Any
    """Example inputs: those given, else what the run or the function knows."""


@contextmanager
def loaded_model(
    where: Where, epoch: int | str, *, model: Any = None, blob: str | None = None, inputs: Any = None
) -> Iterator[LoadedModel]:
    """Make the model and load it; what its code needs stays until the block ends.

    `model` is a callable that makes it, or a module, or None where the run's archive has it. Raises
    UsageError where something is not known, and what `open_checkpoint`, its `load` and the code raise.
    """
    opened, run = open_checkpoint(where, epoch), run_of(where)
    factory = _factory(model)
    if run is None and factory is None:
        raise UsageError(f"{where} is no run directory, so nothing tells its model: give model= (--model)")
    with rebuilt(run, factory, blob) as found:
        made = found.make()
        fill(opened, made.module, found.blob)
        yield LoadedModel(made.module, opened, run, found.of_batches, _example(made, inputs))


def fill(opened: Checkpoint, module: nn.Module, blob: str) -> None:
    """Load a blob of an epoch into a module; raises UsageError where there is none of this name."""
    if blob not in opened.blobs:
        raise UsageError(
            f"epoch {opened.epoch} has no blob {blob!r}, it has {', '.join(opened.blobs)}: "
            "give blob= (--blob)"
        )
    opened.load_saved({blob: module})


def run_of(where: Where) -> Path | None:
    """The run directory; None where there are checkpoints alone."""
    text = os.fspath(where)
    if is_url(text) and not text.startswith(FILE):
        return None
    path = Path(text.removeprefix(FILE)).absolute()
    return path if (path / "run.json").is_file() else None


def _factory(model: Any) -> Callable[[], Any] | None:
    if isinstance(model, nn.Module):
        return lambda: model
    if model is not None and not callable(model):
        raise UsageError(f"model={model!r:.80}: give a callable that makes the module, or the module")
    return model  # type: ignore[no-any-return]


def _example(made: Made, given: Any) -> Any:
    found = made.inputs() if given is None and made.inputs is not None else given
    if found is None:
        raise UsageError("what is the model called with? give inputs= (--input x=float32[batch,10])")
    return found
