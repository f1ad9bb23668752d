"""The subcommand `server` for runs of programs and configurations.

The archived code of the run builds the program once, before serving; `--watch` runs no user code.
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
from torchrelay.runners.programs.evaluate import Used, use
from torchrelay.runners.programs.program import ProgramCommand, Samples
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
    from torchrelay.runners.programs.command_context import ConfigCommand
    from torchrelay.tools.serving.app import Running
    from torchrelay.tools.serving.handlers import Served


_LOOK_SECS = 1.0


def serve_program(command: ProgramCommand) -> int:
    """Serve and return the exit code; checks everything that `eval` checks before listening."""
    check_installed()
    used = use(command)
    if used.said:
        say(used.said)

    def began(running: Running) -> None:
        if command.archived is not None:
            leave_with_parent(running.stop)

    def source() -> EpochModelSource:
        where = followed(command.request, used)
        return EpochModelSource(used.path, where, lambda opened: served_of(command, used, opened), say)

    return serve(command.request.serve or ServeOptions(), source, began=began)


def followed(request: VerbRequest, used: Used) -> str:
    """Return the epoch to serve: with `--watch` "last" or "best", else the resolved epoch."""
    wish = request.epoch or "last"
    if request.serve is None or not request.serve.watch:
        return used.name
    if wish not in ("last", "best"):
        raise UsageError(f"--watch follows last or best: remove --epoch {wish:.40}")
    return wish


def served_of(command: ProgramCommand, used: Used, opened: Checkpoint) -> Served:
    """Load an epoch into a new program object, because a served one is never modified."""
    program = command.made()
    set_seed(program.seed)
    opened.load_saved({"model": program.model})
    signature = noted_signature(Path(used.path))
    return served_epoch(opened, used.run, ProgramHandler(program), used.code_id, signature)


def leave_with_parent(stop: Callable[[], None]) -> None:
    """End this process when its parent process ends."""
    parent = os.getppid()

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_LOOK_SECS)
        stop()

    threading.Thread(target=look, name="torchrelay serve parent", daemon=True).start()


class ProgramHandler:
    """Handler of a program; batches only with torchrelay's `prepare_sample` and `eval`, or `batches_samples`.

    For other programs the batch dimension is unknown. `own_mode`: the user's `eval` decides on gradients.
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
        """Prepare the sample with the program."""
        return self._program.decode_sample(sent)

    def alike(self, sample: Any) -> Hashable:
        """Return shapes and types, or a unique key without batching."""
        return shape_of(sample) if self._batches else object()

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return the results, computed one by one or as one batch."""
        if len(samples) > 1:
            return self._batch(samples)
        if isinstance(samples[0], (str, PathLike)) and self.own_mode:
            raise ValueError("a text is not a valid sample: eval would treat it as a file name")
        return [self._program.eval(samples[0]) if self.own_mode else self._program.result_of(samples[0])]

    def encode(self, result: Any) -> Any:
        """Convert the result with the program."""
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


def serve_config(command: ConfigCommand) -> int:
    """`server -m config.yaml`: serve the run that `eval` would use; returns the exit code."""
    check_installed()
    request = command.request
    if request.ignore:
        raise UsageError(
            f"server -m {command.file} serves with the archived code of a run, so --ignore has no effect: "
            "remove it"
        )
    used = use(command)
    return serve_run(used.path, followed(request, used), request.serve or ServeOptions())


def serve_run(
    run: str, epoch: str, options: ServeOptions, blob: str | None = None, device: str | None = None
) -> int:
    """Serve the traced model that the run's archived source and configuration build."""

    def source(scratch: Path) -> EpochModelSource:
        model = configured_model(Path(run).resolve(), scratch, blob, device)
        return EpochModelSource(run, epoch, model, log_line)

    with tempfile.TemporaryDirectory(prefix="torchrelay-serve-") as scratch:
        return serve(options, lambda: source(Path(scratch)))


def configured_model(run: Path, into: Path, blob: str | None = None, device: str | None = None) -> PlainModel:
    """Trace a run's model, built by its archived code in the folder `into`, which must exist while serving.

    Unused inputs, such as the labels of a batch, are removed. Raises UsageError for a run without a model,
    and for a model that cannot be traced; DamagedError.
    """
    path = into / "program.zip"
    with rebuilt(run, None, blob) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing program is reported below
        module, given = found.make()
        inputs = None if given is None else given()
        package = save(path, module, inputs, source=False, drop_unused=found.of_batches)
    if package.signature is None or not package.has_program:
        lacks = "; ".join(package.without)
        raise UsageError(f"{run}: {lacks}; use --model module:function")
    signature = package.signature

    def handler(module: nn.Module, _: Signature | None) -> PackageHandler:
        return PackageHandler(module, signature)

    return PlainModel(run.name, package.module, found.blob, handler, signature, device, code_id_of_run(run))
