"""`torchrelay.run_to_onnx`: an epoch of a run as an ONNX file, its model made again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.onnx_out.needed import check_packages
from torchrelay.checkpoint.onnx_out.targets import target_of
from torchrelay.checkpoint.onnx_out.to_onnx import OnnxFile, to_onnx
from torchrelay.checkpoint.reader import Checkpoint, open_checkpoint
from torchrelay.checkpoint.remote.urls import is_url
from torchrelay.checkpoint.storage_places import FILE
from torchrelay.errors import UsageError
from torchrelay.runners.onnx_files.describing import run_facts
from torchrelay.runners.onnx_files.rebuilding import rebuilt


def run_to_onnx(
    where: str | os.PathLike[str],
    path: str | os.PathLike[str],
    epoch: int | str = "last",
    *,
    model: Callable[[], Any] | torch.nn.Module | None = None,
    inputs: Any = None,
    blob: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> OnnxFile:
    """Write the model of an epoch of a run directory, or of checkpoints, as an ONNX file, as `to_onnx` does.

    The model is made again **by running the archived source** of the run where that is of a `Program` or of
    a configuration (of several phases `blob="<phase>.model"` says which); `inputs` are then, unless given,
    taken from its data (`Program.example_inputs`). Of any other run `model` makes it: a callable that returns
    it, or (module, example inputs), or a module, which gets the epoch's weights. These are those of the blob
    `blob` (`model` by default). `options` are those of `to_onnx`. The file's metadata have run, epoch, code
    id and metrics. Raises what `open_checkpoint`, its `load` and `to_onnx` raise.
    """
    check_packages()
    target_of(path, overwrite=overwrite).check()
    opened = open_checkpoint(where, epoch)
    place = _run_of(where)
    with ExitStack() as stack:
        factory = _factory(model)
        if place is None and factory is None:
            raise UsageError(
                f"{where} is no run directory, so nothing tells its model: give model= (--model)"
            )
        found = stack.enter_context(rebuilt(place or Path(), factory, blob))
        stored = found.blob or "model"
        if stored not in opened.blobs:
            raise UsageError(
                f"{where} has no blob {stored!r}, it has {', '.join(opened.blobs)}: give blob= (--blob)"
            )
        opened.load({stored: found.model})
        example = found.inputs() if inputs is None and found.inputs is not None else inputs
        if example is None:
            raise UsageError("what is the model called with? give inputs= (--input x=float32[batch,10])")
        options.setdefault("drop_unused", found.of_batches)
        facts = _facts(place, opened) | dict(options.pop("metadata", None) or {})
        return to_onnx(found.model, example, path, overwrite=overwrite, metadata=facts, **options)


def _factory(model: Any) -> Callable[[], Any] | None:
    if isinstance(model, torch.nn.Module):
        return lambda: model
    if model is not None and not callable(model):
        raise UsageError(f"model={model!r:.80}: give a callable that makes the module, or the module")
    return model  # type: ignore[no-any-return]


def _run_of(where: str | os.PathLike[str]) -> Path | None:
    """The run directory; None where there are checkpoints alone."""
    text = os.fspath(where)
    if is_url(text) and not text.startswith(FILE):
        return None
    path = Path(text.removeprefix(FILE)).absolute()
    return path if (path / "run.json").is_file() else None


def _facts(place: Path | None, opened: Checkpoint) -> dict[str, str]:
    return run_facts(place, str(opened.position), opened.metrics)
