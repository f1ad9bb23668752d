"""The model of a program's or a configuration's run as a server: the verb `server`.

The archived code of the run makes the program before anything is served. Later epochs need it no more, so
that `--watch` runs nothing of the user's beside requests.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.runtime import Signature
from torchrelay.models.package.api import save
from torchrelay.runners.artifacts.rebuild import rebuilt
from torchrelay.runners.programs.command_context import say
from torchrelay.runners.programs.epoch_selection import Used, use
from torchrelay.runners.programs.program import Samples, Scene
from torchrelay.runners.programs.request import ServeOptions, VerbRequest
from torchrelay.tools.serving.handlers import joined, rows, shape_of
from torchrelay.tools.serving.model_sources import (
    EpochModelSource,
    PackageHandler,
    PlainModel,
    code_id_of_run,
    noted_signature,
    served_epoch,
)
from torchrelay.tools.serving.serve import FaultyAnswerError, check_installed, serve
from torchrelay.tools.serving.serve import say as log_line

if TYPE_CHECKING:
    from torchrelay.runners.programs.command_context import ConfiguredScene
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.handlers import Served


_LOOK_SECS = 1.0


def serve_program(scene: Scene) -> int:
    """Serve, and return the exit code. Refuses what `eval` refuses, before anything listens."""
    check_installed()
    used = Used(**use(scene))
    if used.said:
        say(used.said)

    def began(running: Running) -> None:
        if scene.archived is not None:
            leave_with_parent(running.stop)

    def source() -> EpochModelSource:
        where = followed(scene.request, used)
        return EpochModelSource(used.path, where, lambda opened: served_of(scene, used, opened), say)

    return serve(scene.request.serve or ServeOptions(), source, began=began)


def followed(request: VerbRequest, used: Used) -> str:
    """The epoch to serve: with `--watch` what is newest or best, else the very one that was found."""
    wish = request.epoch or "last"
    if request.serve is None or not request.serve.watch:
        return used.name
    if wish not in ("last", "best"):
        raise UsageError(f"--watch follows last or best: leave --epoch {wish:.40} out")
    return wish


def served_of(scene: Scene, used: Used, opened: Checkpoint) -> Served:
    """An epoch in a new object of the program: one that is served is never written to."""
    program = scene.made()
    set_seed(program.seed)
    opened.load_saved({"model": program.model})
    signature = noted_signature(Path(used.path))
    return served_epoch(opened, used.run, ProgramHandler(program), used.code_id, signature)


def leave_with_parent(stop: Callable[[], None]) -> None:
    """Have this process leave when the one that started it is gone: nobody else knows of it."""
    parent = os.getppid()

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_LOOK_SECS)
        stop()

    threading.Thread(target=look, name="torchrelay serve parent", daemon=True).start()


class ProgramHandler:
    """Batches are made where `prepare_sample` and `eval` are torchrelay's own, or `batches_samples` says so.

    Of any other nobody knows which dimension is the batch's. `own_mode`: an `eval` of the user's chooses for
    itself whether gradients are wanted.
    """

    def __init__(self, program: Samples) -> None:
        self._program = program
        kind = type(program)
        self.own_mode = kind.eval is not Samples.eval
        own_batch = kind.prepare_sample is Samples.prepare_sample
        asked = program.batches_samples
        self._batches = not self.own_mode and (own_batch if asked is None else asked)
        program.model.eval()

    def decode(self, sent: Any) -> Any:
        """What the program makes of it."""
        return self._program.decode_sample(sent)

    def alike(self, sample: Any) -> Hashable:
        """Shapes and types; each sample for itself where no batches are made."""
        return shape_of(sample) if self._batches else object()

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Results, one after the other or as one batch."""
        if len(samples) > 1:
            return self._batch(samples)
        if isinstance(samples[0], (str, PathLike)) and self.own_mode:
            raise ValueError("a text is no sample here: eval would take it for the name of a file")
        return [self._program.eval(samples[0]) if self.own_mode else self._program.result_of(samples[0])]

    def encode(self, result: Any) -> Any:
        """What the program says that clients get."""
        return self._program.encode_result(result)

    def _batch(self, samples: Sequence[Any]) -> list[Any]:
        program = self._program
        with program.evaluating():
            output = program.forward(joined([program.prepare_sample(one) for one in samples]))
            try:
                parts = rows(output, len(samples))
            except ValueError as error:
                raise FaultyAnswerError(f"{error}; say batches_samples = False in the program") from None
            return [program.postprocess(part) for part in parts]


def serve_config(scene: ConfiguredScene) -> int:
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

    def source(scratch: Path) -> EpochModelSource:
        model = configured_model(Path(run).resolve(), scratch, blob, device)
        return EpochModelSource(run, epoch, model, log_line)

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
