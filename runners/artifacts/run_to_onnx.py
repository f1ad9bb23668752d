"""`torchrelay.run_to_onnx`: an epoch of a run as an ONNX file, its model made again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torchrelay.models.onnx.exporter.to_onnx import OnnxFile, check_packages, target_of, to_onnx
from torchrelay.runners.artifacts.loaded_model import loaded_model
from torchrelay.runners.training.extras.onnx_export import run_facts


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
    with loaded_model(where, epoch, model=model, blob=blob, inputs=inputs) as found:
        options.setdefault("drop_unused", found.of_batches)
        known = run_facts(found.run, str(found.opened.position), found.opened.metrics)
        facts = known | dict(options.pop("metadata", None) or {})
        done: OnnxFile = to_onnx(
            found.module, found.inputs, path, overwrite=overwrite, metadata=facts, **options
        )
        return done
