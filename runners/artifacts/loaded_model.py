"""The model of an epoch of a run: with its weights, as an ONNX file; functions and inputs as typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.storage.open import FILE, is_url
from torchrelay.errors import UsageError
from torchrelay.models.onnx.exporter.to_onnx import OnnxFile, check_packages, place_of, to_onnx
from torchrelay.records import dataclass
from torchrelay.runners.artifacts.rebuild import rebuilt
from torchrelay.runners.programs.run_selection import imported
from torchrelay.runners.training.extras.onnx_export import run_facts

Where = str | os.PathLike[str]


@dataclass(frozen=True)
class LoadedModel:
    """A module with the weights of an epoch; `run` is None where there are checkpoints alone."""

    module: nn.Module
    opened: Checkpoint
    run: Path | None
    of_batches: bool
    inputs: Any
    """Example inputs: those given, else what the run or the function knows."""


@contextmanager
def loaded_model(
    where: Where, epoch: int | str, *, model: Any = None, blob: str | None = None, inputs: Any = None
) -> Iterator[LoadedModel]:
    """Make the model and load it; what its code needs stays until the block ends.

    `model` is a callable that makes it, or a module, or None where the run's archive has it. Raises
    UsageError where something is not known, and what `open_checkpoint`, its `load` and the code raise.
    """
    opened, run = open_checkpoint(where, epoch), run_of(where)
    factory: Callable[[], Any] | None = (lambda: model) if isinstance(model, nn.Module) else model
    if factory is not None and not callable(factory):
        raise UsageError(f"model={model!r:.80}: give a callable that makes the module, or the module")
    if run is None and factory is None:
        raise UsageError(f"{where} is no run directory, so nothing tells its model: give model= (--model)")
    with rebuilt(run, factory, blob) as found:
        made = found.make()
        if found.blob not in opened.blobs:
            raise UsageError(
                f"epoch {opened.epoch} has no blob {found.blob!r}, it has {', '.join(opened.blobs)}: "
                "give blob= (--blob)"
            )
        opened.load_saved({found.blob: made.module})
        example = made.inputs() if inputs is None and made.inputs is not None else inputs
        if example is None:
            raise UsageError("what is the model called with? give inputs= (--input x=float32[batch,10])")
        yield LoadedModel(made.module, opened, run, found.of_batches, example)


def run_of(where: Where) -> Path | None:
    """The run directory; None where there are checkpoints alone."""
    text = os.fspath(where)
    if is_url(text) and not text.startswith(FILE):
        return None
    path = Path(text.removeprefix(FILE)).absolute()
    return path if (path / "run.json").is_file() else None


_TEXT = re.compile(r"(\w[\w.]*)=(\w+)\[([^\[\]]*)\]")
_NAMED_SIZE = 3
"""How large a named size of an example is, unless the text says it."""


@dataclass(frozen=True)
class TypedInputs:
    """Examples by name, and the names of their sizes, as `to_onnx` takes them."""

    tensors: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]


def typed_inputs(texts: Sequence[str]) -> TypedInputs:
    """Tensors of these forms: numbers drawn from a normal distribution, zeros where they are whole.

    A size is a number, a name (3 in the example), or `name=size`. Raises UsageError.
    """
    tensors, dynamic = {}, {}
    draw = torch.Generator().manual_seed(0)
    for text in texts:
        found = _TEXT.fullmatch(text)
        dtype = getattr(torch, found[2], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"--input {text!r}: give it as x=float32[batch,3,32,32], a size's name where it differs"
            )
        sizes = [_size(text, one.strip()) for one in found[3].split(",") if one.strip()]
        shape = [size for _, size in sizes]
        kind = dtype.is_floating_point or dtype.is_complex
        tensors[found[1]] = (
            torch.randn(shape, generator=draw).to(dtype) if kind else torch.zeros(shape, dtype=dtype)
        )
        dynamic[found[1]] = {dim: name for dim, (name, _) in enumerate(sizes) if name is not None}
    return TypedInputs(tensors, dynamic)


def _size(text: str, one: str) -> tuple[str | None, int]:
    name, equals, number = one.partition("=")
    if one.isascii() and one.isdecimal() and int(one[:9]) > 0:
        return None, int(one)
    if name.isidentifier() and (not equals or (number.isascii() and number.isdecimal() and int(number) > 0)):
        return name, int(number) if equals else _NAMED_SIZE
    raise UsageError(f"--input {text!r}: {one!r} is no size; give 32, batch, or time=16")


def named(text: str, what: str) -> Any:
    """What `module:name` names, imported from here; raises UsageError where there is no such thing.

    `what` is the option, for messages.
    """
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{what} {text!r:.80}: give module:name")
    found = imported(module, name, what)
    if not callable(found):
        raise UsageError(f"{what}: {module} has no {name} that can be called")
    return found


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
    place_of(path, overwrite=overwrite)
    with loaded_model(where, epoch, model=model, blob=blob, inputs=inputs) as found:
        options.setdefault("drop_unused", found.of_batches)
        known = run_facts(found.run, str(found.opened.position), found.opened.metrics)
        facts = known | dict(options.pop("metadata", None) or {})
        done: OnnxFile = to_onnx(
            found.module, found.inputs, path, overwrite=overwrite, metadata=facts, **options
        )
        return done
