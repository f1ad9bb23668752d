"""Sources of served models (epochs of a run, functions, packages, programs), and the subcommand `server`.

The archived code of the run builds the program once, before serving; `--watch` runs no user code.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import candidates, place_of, read_log
from torchrelay.checkpoint.load.tensors import checked_device
from torchrelay.checkpoint.log.chain import read_hint
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView, find_tail, named_entry, wanted
from torchrelay.errors import DamagedError, NoProvableEpochError, RelayError, UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.runtime import Signature
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.fs import read_json
from torchrelay.models.package.reader import open_package
from torchrelay.records import dataclass
from torchrelay.runners.programs.request import ServeOptions, VerbRequest
from torchrelay.tools.serving.handlers import (
    Sample,
    Say,
    Served,
    ServingHandler,
    TensorHandler,
    dtype_of,
    joined,
    rows,
    shape_of,
)
from torchrelay.tools.serving.serve import FaultyAnswerError, check_installed, serve
from torchrelay.tools.serving.serve import say as log_line

if TYPE_CHECKING:
    from torchrelay.runners.programs.command_context import ConfigCommand
    from torchrelay.runners.programs.evaluate import Used
    from torchrelay.runners.programs.program import ProgramCommand, Samples
    from torchrelay.tools.serving.app import Running


Make = Callable[[Checkpoint], Served]
"""Loads the model of an opened epoch."""


class EpochModelSource:
    """Epochs of a run or checkpoint directory, loaded by `make`, each tried once.

    `wish` is an epoch as in `open_checkpoint`. `last` and `best` never select epoch 0, which is untrained.
    """

    def __init__(self, where: str, wish: str, make: Make, say: Say) -> None:
        self.where, self._make, self._say = where, make, say
        self._place, self._wish = place_of(where), wanted(wish)
        self._damaged: dict[str, str] = {}
        self._seen_slot: int | None = None

    @property
    def follows(self) -> bool:
        """True if the selected epoch can change."""
        return not self._wish.explicit

    def first(self) -> Served:
        """Load the selected epoch; raises the errors of `open_checkpoint` and its `load`."""
        view = read_log(self._place)
        if self._wish.explicit:
            return self._made(named_entry(view, self._wish, self._place.url))
        found = self._newest(view, None)
        if found is None:
            why = "; ".join(self._damaged.values())
            raise NoProvableEpochError(f"no epoch in {self._place.url} is usable: {why}")
        return found

    def newer(self, served: Served) -> Served | None:
        """Load the selected epoch if it has changed; an unchanged log is not read again."""
        if not self.follows:
            return None
        storage = self._place.storage
        slot = find_tail(lambda slot: storage.stat(slot_path(slot)) is not None, read_hint(storage))
        if slot is not None and slot == self._seen_slot:
            return None
        found = self._newest(read_log(self._place), served)
        self._seen_slot = slot
        return found

    def _newest(self, view: LogView, served: Served | None) -> Served | None:
        every = candidates(self._place, view, self._wish, None, self._say)
        entries = [one for one in every if one.position.epoch > 0]
        if not entries and served is None:
            raise UsageError(f"{self._place.url} has no trained epoch yet")
        for entry in entries:
            if served is not None:  # never goes back to older ones
                older = served.branch == entry.branch and entry.position.epoch <= (served.epoch or 0)
                if served.key == entry.attempt_name or (self._wish.word == "last" and older):
                    return None
            if entry.attempt_name not in self._damaged:
                try:
                    return self._made(entry)
                except DamagedError as error:
                    self._damaged[entry.attempt_name] = f"{error}"
                    stays = f"epoch {served.epoch} is still served" if served else "an older one is tried"
                    self._say(f"epoch {entry.position.epoch} cannot be served, {stays}: {error}")
        return None

    def _made(self, entry: CommittedPosition) -> Served:
        return self._make(open_checkpoint(self.where, f"{entry.position.epoch},branch={entry.branch}"))


def name_of(where: str) -> str:
    """Return the name of a run, which is that of its directory."""
    return Path(where).resolve().name or where


MakeHandler = Callable[[torch.nn.Module, "Signature | None"], ServingHandler]
_SIGNATURE_BYTES = 1 << 20


@dataclass(frozen=True)
class PlainModel:
    """Builds a module with a function and loads one blob of an epoch into it."""

    name: str
    factory: Callable[[], Any]
    blob: str
    handler: MakeHandler
    signature: Signature | None
    device: str | None
    code_id: str | None

    def __call__(self, opened: Checkpoint) -> Served:
        """Build and load the module; raises the errors of the function and of `Checkpoint.load`."""
        module = self.factory()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"--model returned {module!r:.60}, which is not a torch.nn.Module")
        module.to(checked_device(self.device) or torch.device("cpu"))
        if self.blob not in opened.blobs:
            there = ", ".join(opened.blobs)
            raise UsageError(f"{self.name} has no blob {self.blob!r}, it has {there}: give --blob")
        opened.load_saved({self.blob: module})
        made = self.handler(module, self.signature)
        return served_epoch(opened, self.name, made, self.code_id, self.signature)


def served_epoch(
    opened: Checkpoint,
    name: str,
    handler: ServingHandler,
    code_id: str | None,
    signature: Signature | None,
) -> Served:
    """Return the served model of an epoch with a handler."""
    about = {"metrics": dict(opened.metrics)}
    key = opened.entry.attempt_name
    return Served(name, handler, opened.epoch, opened.branch, code_id, signature, key, about)


def handler_of(text: str | None) -> MakeHandler:
    """Return the class of `--handler`, by default TensorHandler."""
    if text is None:
        return TensorHandler
    from torchrelay.runners.artifacts.rebuild import named  # with all that trains a configuration

    kind = named(text, "--handler")
    missing = [
        one for one in ("decode", "alike", "predict", "encode") if not callable(getattr(kind, one, None))
    ]
    if missing:
        raise UsageError(f"--handler {text} has no {', '.join(missing)}: see torchrelay.ServingHandler")
    return kind  # type: ignore[no-any-return]


def read_signature(path: str | None) -> Signature | None:
    """Read a signature from a JSON file; raises UsageError."""
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()[:_SIGNATURE_BYTES]
        signature = Signature.from_json(json.loads(data))
        for spec in (*signature.inputs, *signature.outputs):
            dtype_of(spec)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--signature {path}: {error}") from None
    if not signature.inputs or not all(spec.shape for spec in signature.inputs):
        raise UsageError(f"--signature {path}: each input needs a first dimension for the batch")
    return signature


def code_id_of_run(run: Path) -> str | None:
    """Return the code id of the run's newest launch, if its source was archived."""
    try:
        known = [found for one in captures(run) if (found := code_id_of(one)) is not None]
    except RelayError:
        return None
    return known[-1] if known else None


class PackageHandler(TensorHandler):
    """Handler of a package; if the inputs' first size is fixed to 1, samples are computed one by one."""

    def __init__(self, module: Any, signature: Signature) -> None:
        super().__init__(module, signature)
        self._specs = signature
        self._batch = batch_size_of(signature)

    def alike(self, sample: Sample) -> Hashable:
        """Return the key of the sample, unique if the batch size is 1."""
        return object() if self._batch == 1 else shape_of(sample)

    def predict(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """Run the program once for all samples."""
        inputs = [
            torch.stack([one[spec.name] for one in samples]).to(self.device) for spec in self._specs.inputs
        ]
        outputs: list[Any] = self.module.flat(inputs)  # type: ignore[operator]
        named = [
            (spec.name, one, isinstance(one, torch.Tensor) and spec.shape[:1] == (self._batch,))
            for spec, one in zip(self._specs.outputs, outputs, strict=True)
        ]
        found = [
            {name: one[at] if of_batch else one for name, one, of_batch in named}
            for at in range(len(samples))
        ]
        return [next(iter(one.values())) if len(one) == 1 else one for one in found]

    def encode(self, result: Any) -> Any:
        """Return the outputs, which already have the signature's names."""
        return result


def batch_size_of(signature: Signature) -> int | str:
    """Return the first size shared by all inputs; raises UsageError if it cannot be a batch size."""
    sizes = {spec.shape[0] if spec.shape else None for spec in signature.inputs}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None or (isinstance(size, int) and size != 1):
        given = ", ".join(f"{spec.name} {spec.shape}" for spec in signature.inputs)
        raise UsageError(
            f"the inputs are {given}: expected the same first size of all, dynamic or 1, for the batch"
        )
    return size


class PackageSource:
    """Source of one package, which never changes."""

    follows = False

    def __init__(self, path: str, handler: MakeHandler | None, device: str | None) -> None:
        self._path, self._handler, self._device = path, handler, device

    def first(self) -> Served:
        """Load the package; raises the errors of `open_package` and `Package.module`."""
        package = open_package(self._path)
        module = package.module()
        if package.signature is None:
            raise UsageError(f"{self._path} has no signature: save it with inputs")
        module.to(checked_device(self._device) or torch.device("cpu"))
        make = self._handler or PackageHandler
        known, described = package.metadata, package.preprocessing
        about = {
            "package": self._path,
            "labels": list(package.labels) if package.labels is not None else None,
            "preprocessing": described if isinstance(described, str) else None,
        }
        epoch = known.get("epoch")
        return Served(
            str(known.get("run") or Path(self._path).name),
            make(module, package.signature),
            epoch if type(epoch) is int else None,
            None,
            known.get("code_id"),
            package.signature,
            self._path,
            about,
        )

    def newer(self, served: Served) -> Served | None:
        """Return None: a package never changes."""
        return None


_LOOK_SECS = 1.0


def serve_program(command: ProgramCommand) -> int:
    """Serve and return the exit code; checks everything that `eval` checks before listening."""
    from torchrelay.runners.programs.command_context import say
    from torchrelay.runners.programs.evaluate import use

    check_installed()
    used = use(command)
    if used.said:
        say(used.said)

    def began(running: Running) -> None:
        parent = os.getppid()

        def look() -> None:
            while os.getppid() == parent:
                time.sleep(_LOOK_SECS)
            running.stop()

        if command.archived is not None:  # then the parent process only waits for this one
            threading.Thread(target=look, name="torchrelay serve parent", daemon=True).start()

    def served(opened: Checkpoint) -> Served:
        program = command.made()  # a new one, because a served one is never modified
        set_seed(program.seed)
        opened.load_saved({"model": program.model})
        signature = None  # that of the training is for information: other sizes may also vary
        with suppress(RelayError):
            noted = read_json(Path(used.path) / "signature.json")
            signature = None if noted is None else Signature.from_json(noted)
        return served_epoch(opened, used.run, ProgramHandler(program), used.code_id, signature)

    def source() -> EpochModelSource:
        return EpochModelSource(used.path, followed(command.request, used), served, say)

    return serve(command.request.serve or ServeOptions(), source, began=began)


def followed(request: VerbRequest, used: Used) -> str:
    """Return the epoch to serve: with `--watch` "last" or "best", else the resolved epoch."""
    wish = request.epoch or "last"
    if request.serve is None or not request.serve.watch:
        return used.name
    if wish not in ("last", "best"):
        raise UsageError(f"--watch follows last or best: remove --epoch {wish:.40}")
    return wish


class ProgramHandler:
    """Handler of a program; batches only with torchrelay's `prepare_sample` and `eval`, or `batches_samples`.

    For other programs the batch dimension is unknown. `own_mode`: the user's `eval` decides on gradients.
    """

    def __init__(self, program: Samples) -> None:
        from torchrelay.runners.programs.program import Samples

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
    from torchrelay.runners.programs.evaluate import use

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
    from torchrelay.models.package.api import save
    from torchrelay.runners.artifacts.rebuild import rebuilt

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
