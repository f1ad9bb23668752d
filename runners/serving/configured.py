"""The model of a configuration's run as what is served: a program made once, filled with any epoch.

The archived code of the run makes the program before anything is served. Later epochs need it no more, so
that `--watch` runs nothing of the user's beside requests.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn

from torchrelay.checkpoint.package.saving import save
from torchrelay.errors import UsageError
from torchrelay.jobs.signature import Signature
from torchrelay.runners.rebuilding.model_of_run import rebuilt
from torchrelay.runners.serving.models import PlainModel, code_id_of_run
from torchrelay.runners.serving.packages import PackageHandler


def configured_model(run: Path, into: Path, blob: str | None = None, device: str | None = None) -> PlainModel:
    """Make the program of a run's model by its archived code, in `into`, a folder that stays while it serves.

    Inputs that no answer depends on, as the labels of a batch, are none of the program's. Raises UsageError
    for a run that tells no model, and for one whose model gives no program; DamagedError.
    """
    path = into / "program.zip"
    with rebuilt(run, None, blob) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no program is told below, with its remedy
        made = found.make()
        inputs = None if made.inputs is None else made.inputs()
        package = save(path, made.module, inputs, source=False, drop_unused=found.of_batches)
    if package.signature is None or not package.has_program:
        lacks = "; ".join(package.without)
        raise UsageError(f"{run}: {lacks}; --model module:function serves it, by a function that makes it")
    signature = package.signature

    def handler(module: nn.Module, _: Signature | None) -> PackageHandler:
        return PackageHandler(module, signature)

    return PlainModel(run.name, package.module, found.blob, handler, signature, device, code_id_of_run(run))
