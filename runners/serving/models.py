"""How the model of an epoch is made: by a function that the user names, or of a package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.handle import checked_device
from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.fs import read_json
from torchrelay.records import dataclass
from torchrelay.runners.artifacts.loaded_model import named
from torchrelay.runners.serving.served import Served, ServingHandler
from torchrelay.runners.serving.tensor_handler import TensorHandler, dtype_of

MakeHandler = Callable[[torch.nn.Module, "Signature | None"], ServingHandler]
_SIGNATURE_BYTES = 1 << 20


@dataclass(frozen=True)
class PlainModel:
    """A module of a function without arguments, filled with one blob of an epoch, and nothing else read."""

    name: str
    factory: Callable[[], Any]
    blob: str
    handler: MakeHandler
    signature: Signature | None
    device: str | None
    code_id: str | None

    def __call__(self, opened: Checkpoint) -> Served:
        """Load it; raises the errors of the function and of `Checkpoint.load`."""
        module = self.factory()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"--model gave {module!r:.60}, which is no torch.nn.Module")
        module.to(checked_device(self.device) or torch.device("cpu"))
        if self.blob not in opened.blobs:
            there = ", ".join(opened.blobs)
            raise UsageError(f"{self.name} has no blob {self.blob!r}, it has {there}: give --blob")
        opened.load_saved({self.blob: module})
        return Served(
            self.name,
            self.handler(module, self.signature),
            opened.epoch,
            opened.branch,
            self.code_id,
            self.signature,
            opened.entry.try_name,
            {"metrics": dict(opened.metrics)},
        )


def handler_of(text: str | None) -> MakeHandler:
    """The class of `--handler`, the one for plain tensors without it."""
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
    """The signature in a JSON file; raises UsageError for anything else."""
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
        raise UsageError(f"--signature {path}: each input has a first dimension, that of the batch")
    return signature


def noted_signature(run: Path) -> Signature | None:
    """What the run noted while it trained, for people: sizes other than the batch's may differ, too."""
    try:
        found = read_json(run / "signature.json")
        return None if found is None else Signature.from_json(found)
    except RelayError:
        return None


def code_id_of_run(run: Path) -> str | None:
    """The code id of the run's newest start, where its source was archived."""
    try:
        known = [found for one in captures(run) if (found := code_id_of(one)) is not None]
    except RelayError:
        return None
    return known[-1] if known else None
