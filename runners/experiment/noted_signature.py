"""What the model of a program takes and gives, as its first call in a training showed it: `signature.json`.

For people and for clients of the server. Of the sizes only the first, that of the batch, is known to differ;
nothing is ever refused because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.errors import RelayError
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.metadata.fs import write_json

FILE = "signature.json"
_BATCH = "batch"


class FirstCall:
    """Notes the shapes of a module's first call, then takes its hook out."""

    def __init__(self, module: nn.Module) -> None:
        self.signature: Signature | None = None
        self._handle = module.register_forward_hook(self._seen, with_kwargs=True)

    def _seen(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        self._handle.remove()
        self.signature = signature_of(module, args, kwargs, output)

    def write(self, run: Path) -> None:
        """Store it in the run, once; a run that cannot take it goes on without."""
        if self.signature is not None and not (run / FILE).exists():
            with suppress(RelayError):
                write_json(run / FILE, self.signature.to_json(), durable=False)


def signature_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> Signature | None:
    """What one call took and gave; None where that is not tensors with a first dimension."""
    named = [*zip(_names(module, len(args)), args, strict=True), *kwargs.items()]
    inputs = [spec for name, value in named for spec in _specs(name, value)]
    outputs = list(_specs("output", output))
    if not inputs or not outputs or not all(spec.shape for spec in inputs):
        return None
    return Signature(tuple(inputs), tuple(outputs))


def _names(module: nn.Module, count: int) -> list[str]:
    """The names of `forward`'s first parameters."""
    try:
        known = [
            one.name
            for one in inspect.signature(module.forward).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    return [known[at] if at < len(known) else f"input_{at}" for at in range(count)]


def _specs(name: str, value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, torch.Tensor):
        rest = tuple(value.shape)[1:]
        shape: tuple[Size, ...] = (_BATCH, *rest) if value.ndim else ()
        yield TensorSpec(name, shape, str(value.dtype).removeprefix("torch."))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _specs(str(key) if name == "output" else f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from _specs(f"{name}_{at}", one)
