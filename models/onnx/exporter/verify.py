"""Whether a file answers as the model does: onnxruntime and torch on the same inputs, in two sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchrelay.errors import UsageError
from torchrelay.models.onnx.exporter.inputs import Example, leaf_names, name_of_path
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Answers are alike where |onnx - torch| <= `atol` + `rtol` * |torch|; whole numbers must be equal."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Case:
    """Inputs, and what torch made of them."""

    extents: Mapping[str, int]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]


def cases_of(model: torch.nn.Module, example: Example, output_names: Sequence[str] | None) -> list[Case]:
    """The example as it is and, where sizes may differ, with other ones; raises UsageError."""
    extents = example.extents()
    first = _case(model, example, extents, output_names, "")
    if not extents:
        return [first]
    other = {size: _other(extent) for size, extent in extents.items()}
    remedy = "; where a size of the inputs never differs, leave it out of dynamic="
    return [first, _case(model, example.resized(other), other, output_names, remedy)]


def compare(path: Path, cases: Sequence[Case], tolerance: Tolerance) -> float:
    """The greatest difference; raises UsageError where one is beyond the tolerance, or nothing can be run."""
    session = _session(path)
    taken = [one.name for one in session.get_inputs()]
    worst = 0.0
    for case in cases:
        try:
            found = session.run(None, {name: case.inputs[name].numpy() for name in taken})
        except Exception as error:
            raise UsageError(_not_run(error)) from error
        for (name, wanted), answer in zip(case.outputs.items(), found, strict=True):
            worst = max(worst, _difference(name, torch.from_numpy(answer), wanted, tolerance, case.extents))
    return worst


def _other(extent: int) -> int:
    """Fewer where that leaves two and more: longer than the example a model may refuse to be."""
    return extent - 1 if extent > 2 else extent + 1


def _case(
    model: torch.nn.Module,
    example: Example,
    extents: Mapping[str, int],
    names: Sequence[str] | None,
    remedy: str,
) -> Case:
    inputs = [tensor.clone() for tensor in example.tensors]
    try:
        answer = model(*example.args, **example.kwargs)
    except Exception as error:
        said = ", ".join(f"{size} {extent}" for size, extent in extents.items())
        raise UsageError(
            f"the model itself fails with the inputs ({said or 'as given'}): {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]:.200}{remedy}"
        ) from error
    outputs = _outputs(answer, names)
    return Case(extents, dict(zip(example.names, inputs, strict=True)), outputs)


def _outputs(answer: Any, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path(answer)[0]
    own = leaf_names([name_of_path(path) or "output" for path, leaf in leaves if leaf is not None])
    tensors = [leaf for _, leaf in leaves if leaf is not None]
    for name, leaf in zip(own, tensors, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(f"forward returns {leaf!r:.60} as {name!r}: a file gives tensors only")
    if not tensors:
        raise UsageError("forward returns no tensor, so there is nothing to put into a file")
    if names is not None and (isinstance(names, str) or len(names) != len(own) or len(set(names)) < len(own)):
        raise UsageError(
            f"output_names={names!r}: give {len(own)} different names, one for each of {', '.join(own)}"
        )
    return dict(zip(own if names is None else names, (one.detach().clone() for one in tensors), strict=True))


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UsageError(_not_run(error)) from error


def _not_run(error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"onnxruntime cannot run the exported model, so nothing was compared or written: {reason:.300}; "
        "compare=False writes what the checker alone has seen"
    )


def _difference(
    name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance, extents: Mapping[str, int]
) -> float:
    where = ", ".join(f"{size} {extent}" for size, extent in extents.items()) or "the inputs as given"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise UsageError(
            f"output {name!r} is {found.dtype} {list(found.shape)} in ONNX and {wanted.dtype} "
            f"{list(wanted.shape)} in torch, with {where}: nothing was written"
        )
    exact = not wanted.is_floating_point()
    rtol, atol = (0.0, 0.0) if exact else (tolerance.rtol, tolerance.atol)
    ours, theirs = found.double(), wanted.double()
    apart = (ours - theirs).abs().nan_to_num(nan=0.0, posinf=float("inf"))
    apart[ours == theirs] = 0.0
    greatest = float(apart.max()) if apart.numel() else 0.0
    if not torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
        raise UsageError(
            f"output {name!r} differs by up to {greatest:.3g} between ONNX and torch, with {where} "
            f"(allowed: {atol:g} + {rtol:g} of the value): nothing was written"
        )
    return greatest
