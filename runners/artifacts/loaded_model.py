"""Load the model of an epoch with its weights, and parse functions and inputs given on the command line."""

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
    """A module with the weights of an epoch; `run` is None for checkpoints without a run directory."""

    module: nn.Module
    opened: Checkpoint
    run: Path | None
    of_batches: bool
    inputs: Any
    """Example inputs: those given, else those of the run or of the function."""


@contextmanager
def loaded_model(
    where: Where, epoch: int | str, *, model: Any = None, blob: str | None = None, inputs: Any = None
) -> Iterator[LoadedModel]:
    """Build the model and load its weights; the code that it needs stays loaded until the block ends.

    `model` is a module or a callable that returns one; None builds it from the run's archive. Raises
    UsageError if something is missing, and the errors of `open_checkpoint`, its `load` and the user's code.
    """
    opened, run = open_checkpoint(where, epoch), run_of(where)
    factory: Callable[[], Any] | None = (lambda: model) if isinstance(model, nn.Module) else model
    if factory is not None and not callable(factory):
        raise UsageError(f"invalid model={model!r:.80}: expected a module or a callable that returns one")
    if run is None and factory is None:
        raise UsageError(f"{where} is not a run directory, so its model is unknown: pass model= (--model)")
    with rebuilt(run, factory, blob) as found:
        made = found.make()
        if found.blob not in opened.blobs:
            raise UsageError(
                f"epoch {opened.epoch} has no blob {found.blob!r}, it has {', '.join(opened.blobs)}: "
                "choose one with blob= (--blob)"
            )
        opened.load_saved({found.blob: made.module})
        example = made.inputs() if inputs is None and made.inputs is not None else inputs
        if example is None:
            raise UsageError("example inputs are missing: pass inputs= (--input x=float32[batch,10])")
        yield LoadedModel(made.module, opened, run, found.of_batches, example)


def run_of(where: Where) -> Path | None:
    """Return the run directory; None if there are checkpoints only."""
    text = os.fspath(where)
    if is_url(text) and not text.startswith(FILE):
        return None
    path = Path(text.removeprefix(FILE)).absolute()
    return path if (path / "run.json").is_file() else None


_TEXT = re.compile(r"(\w[\w.]*)=(\w+)\[([^\[\]]*)\]")
_NAMED_SIZE = 3
"""Default value of a named size in example inputs."""


@dataclass(frozen=True)
class TypedInputs:
    """Example tensors by name, and the names of their dynamic sizes, as `to_onnx` takes them."""

    tensors: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]


def typed_inputs(texts: Sequence[str]) -> TypedInputs:
    """Make example tensors: floating types are drawn from a normal distribution, integers are zero.

    A size is a number, a name (3 in the example), or `name=size`. Raises UsageError.
    """
    tensors, dynamic = {}, {}
    draw = torch.Generator().manual_seed(0)
    for text in texts:
        found = _TEXT.fullmatch(text)
        dtype = getattr(torch, found[2], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"invalid --input {text!r}: expected name=dtype[sizes], for example x=float32[batch,3,32,32]"
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
    """Parse one size into its name, if it has one, and its number."""
    name, equals, number = one.partition("=")
    if one.isascii() and one.isdecimal() and int(one[:9]) > 0:
        return None, int(one)
    if name.isidentifier() and (not equals or (number.isascii() and number.isdecimal() and int(number) > 0)):
        return name, int(number) if equals else _NAMED_SIZE
    raise UsageError(f"--input {text!r}: invalid size {one!r}: expected 32, batch, or time=16")


def named(text: str, what: str) -> Any:
    """Import `module:name`; the working directory is searched first. Raises UsageError if it cannot be found.

    `what` is the option, for messages.
    """
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"invalid {what} {text!r:.80}: expected module:name")
    found = imported(module, name, what)
    if not callable(found):
        raise UsageError(f"{what}: {module} has no callable {name}")
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
    """Write the model of an epoch of a run directory, or of checkpoints, as an ONNX file.

    For a run of a `Program` or of a configuration the model is rebuilt **by running the archived source**.

    Args:
        where: Run directory, or directory of checkpoints.
        path: The ONNX file to write.
        epoch: A number, `"last"`, `"best"`, or a tag.
        model: A module, or a callable that returns one or (module, example inputs). Required for runs of
            plain jobs.
        inputs: Example inputs; default: those of the data (`Program.example_inputs`).
        blob: The blob with the weights; default `model`. For several phases `"<phase>.model"` selects one.
        overwrite: Replace an existing file.
        options: Options of `to_onnx`.

    Returns:
        The written file. Its metadata holds run, epoch, code id and metrics.

    Raises:
        UsageError: The model or its inputs are unknown; also errors of `open_checkpoint`, its `load`,
            `to_onnx`.

    Example:
        run_to_onnx("runs/x", "x.onnx", epoch="best")
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
