"""The model of a configuration's run as what is served: a program made once, filled with any epoch.

The archived code of the run makes the program before anything is served. Later epochs need it no more, so
that `--watch` runs nothing of the user's beside requests.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.models.package.api import save
from torchrelay.runners.artifacts.rebuild import rebuilt
from torchrelay.runners.experiment.server_verb import followed
from torchrelay.runners.programs.epoch_selection import Used, use
from torchrelay.runners.programs.serve_options import ServeOptions
from torchrelay.runners.serving.epochs import EpochSource
from torchrelay.runners.serving.models import PlainModel, code_id_of_run
from torchrelay.runners.serving.packages import PackageHandler
from torchrelay.runners.serving.serve import check_installed, say, serve

if TYPE_CHECKING:
    from torchrelay.runners.programs.command_context import ConfiguredScene


def server(scene: ConfiguredScene) -> int:
    """`server -m config.yaml`: serve the run that `eval` would use; returns the exit code."""
    check_installed()
    request = scene.request
    if request.ignore:
        raise UsageError(
            f"server -m {scene.file} serves by the code archived with a run, so that --ignore does nothing: "
            "leave it out, or name the run with --run"
        )
    used = Used(**use(scene))
    return serve_run(used.path, followed(request, used), request.serve or ServeOptions())


def serve_run(
    run: str, epoch: str, options: ServeOptions, blob: str | None = None, device: str | None = None
) -> int:
    """Serve a program of the model that the run's archived source and configuration make."""

    def source(scratch: Path) -> EpochSource:
        model = configured_model(Path(run).resolve(), scratch, blob, device)
        return EpochSource(run, epoch, model, say)

    with tempfile.TemporaryDirectory(prefix="torchrelay-serve-") as scratch:
        return serve(options, lambda: source(Path(scratch)))


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
