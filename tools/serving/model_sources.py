"""Sources of served models: epochs of a run, functions of the user, packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import candidates, place_of, read_log
from torchrelay.checkpoint.load.tensors import checked_device
from torchrelay.checkpoint.log.chain import read_hint
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView, find_tail, named_entry, wanted
from torchrelay.errors import DamagedError, NoProvableEpochError, RelayError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.fs import read_json
from torchrelay.models.package.reader import Package, open_package
from torchrelay.records import dataclass
from torchrelay.runners.artifacts.rebuild import named
from torchrelay.tools.serving.handlers import (
    Sample,
    Say,
    Served,
    ServingHandler,
    TensorHandler,
    dtype_of,
    shape_of,
)

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
            if served is not None and self._is_reached(entry, served):
                return None
            if entry.attempt_name not in self._damaged:
                try:
                    return self._made(entry)
                except DamagedError as error:
                    self._damaged[entry.attempt_name] = f"{error}"
                    stays = f"epoch {served.epoch} is still served" if served else "an older one is tried"
                    self._say(f"epoch {entry.position.epoch} cannot be served, {stays}: {error}")
        return None

    def _is_reached(self, entry: CommittedPosition, served: Served) -> bool:
        """Return True if no newer or better epoch is left; never goes back to older ones."""
        older = served.branch == entry.branch and entry.position.epoch <= (served.epoch or 0)
        return served.key == entry.attempt_name or (self._wish.word == "last" and older)

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


def noted_signature(run: Path) -> Signature | None:
    """Return the signature recorded in training, for information: other sizes may also vary."""
    try:
        found = read_json(run / "signature.json")
        return None if found is None else Signature.from_json(found)
    except RelayError:
        return None


def code_id_of_run(run: Path) -> str | None:
    """Return the code id of the run's newest launch, if its source was archived."""
    try:
        known = [found for one in captures(run) if (found := code_id_of(one)) is not None]
    except RelayError:
        return None
    return known[-1] if known else None


class PackageHandler(TensorHandler):
    """Handler of a package; samples are rows of the inputs and of outputs with the batch size.

    If the inputs' first size is fixed to 1, samples are computed one by one.
    """

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
        return [self._of_sample(outputs, at) for at in range(len(samples))]

    def _of_sample(self, outputs: Sequence[Any], at: int) -> Any:
        found = {
            spec.name: one[at] if self._is_shared(spec, one) else one
            for spec, one in zip(self._specs.outputs, outputs, strict=True)
        }
        return next(iter(found.values())) if len(found) == 1 else found

    def _is_shared(self, spec: TensorSpec, output: Any) -> bool:
        return isinstance(output, torch.Tensor) and bool(spec.shape) and spec.shape[0] == self._batch

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
        known = package.metadata
        return Served(
            str(known.get("run") or Path(self._path).name),
            make(module, package.signature),
            _whole(known.get("epoch")),
            None,
            known.get("code_id"),
            package.signature,
            self._path,
            {"package": self._path, **_description(package)},
        )

    def newer(self, served: Served) -> Served | None:
        """Return None: a package never changes."""
        return None


def _description(package: Package) -> dict[str, Any]:
    labels = list(package.labels) if package.labels is not None else None
    text = package.preprocessing if isinstance(package.preprocessing, str) else None
    return {"labels": labels, "preprocessing": text}


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
