"""`torchrelay.to_onnx`: export a module to an ONNX file that was compared with the module.

External weights have a unique name and are written first. The file that refers to them is written last and
atomically, so that readers see either the old or the new model.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

import torchrelay
from torchrelay.checkpoint.files.publish import Where, check_free, expanded, publish
from torchrelay.errors import UsageError, install_command
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.models.archive.api import recorded_call
from torchrelay.models.onnx.exporter.graph import (
    Dynamic,
    Example,
    bare_module,
    chosen_names,
    example_of,
    graph_of,
    kept_buffers,
    leaf_names,
    name_of_path,
    named,
    own_copy,
)
from torchrelay.models.package.compile import undisturbing
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir


def place_of(where: Where, *, overwrite: bool) -> Path | str:
    """Check that an ONNX file can be written to the path, without writing; raises UsageError."""
    place = expanded(where, "the ONNX file")
    check_free(place, overwrite=overwrite)
    return place


def _weights_beside(path: Path) -> list[Path]:
    """Return external weights to which the existing file refers; others may belong to a concurrent export."""
    ours = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{12}}\.data")
    found = [one for one in path.parent.iterdir() if ours.fullmatch(one.name)]
    if not found or not path.is_file() or not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [one for one in found if content.find(os.fsencode(one.name)) >= 0]


_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Raise UsageError if a package is missing; imports none."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX files need {', '.join(missing)}: {install_command('onnx')}")


RTOL, ATOL = 1e-3, 1e-4
SIGNATURE = "torchrelay.signature"
EXTERNAL_FROM_BYTES = 1_900_000_000
"""Models from this size on have external weights, because protobuf files are limited to 2 GiB."""


@dataclass(frozen=True)
class OnnxFile:
    """Result of an export; `compared` are the sizes for which onnxruntime and torch agree to `difference`."""

    path: str
    signature: Signature
    opset: int
    bytes: int
    compared: tuple[Mapping[str, int], ...] = ()
    difference: float = 0.0


def to_onnx(
    model: torch.nn.Module,
    inputs: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic: Dynamic | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    rtol: float = RTOL,
    atol: float = ATOL,
    compare: bool = True,
    drop_unused: bool = False,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Any:
    """Export a module in eval mode to an ONNX file, checked and compared with torch by onnxruntime.

    Args:
        model: The module.
        inputs: Example inputs: a tensor, a sequence of arguments, or a mapping by name; may be nested.
        path: File name or fsspec URL; None returns the model without writing.
        dynamic: False, or names of sizes: `{"tokens": {0: "batch", 1: "time"}}`; default: the batch.
        input_names: Names of the inputs; default: the parameters of `forward`.
        output_names: Names of the outputs; default: the keys of the result.
        opset: ONNX operator set.
        rtol: Allowed relative difference.
        atol: Allowed absolute difference.
        compare: Compare with onnxruntime, for the example and other sizes.
        drop_unused: Omit inputs that do not affect the outputs.
        metadata: Strings to store in the file.
        overwrite: Replace an existing file.

    Returns:
        An OnnxFile, or without `path` an `onnx.ModelProto`.

    Example:
        to_onnx(model, torch.zeros(1, 3, 32, 32), "model.onnx")
    """
    check_packages()
    if inputs is None:
        inputs, recorded = _recorded(model)
        dynamic = recorded if dynamic is None else dynamic
    dynamic = True if dynamic is None else dynamic
    if path is None:
        return _proto(model, inputs, dynamic=dynamic, input_names=input_names, output_names=output_names,
                      opset=opset, rtol=rtol, atol=atol, compare=compare, drop_unused=drop_unused,
                      metadata=metadata)  # fmt: skip
    place = place_of(path, overwrite=overwrite)
    example = example_of(bare_module(model), inputs, input_names, dynamic)
    _check_options(rtol, atol, metadata or {})
    with undisturbing():
        graph, signature, cases = _exported(own_copy(model), example, output_names, opset, drop_unused)
        _describe(graph, signature, metadata or {})
        tolerance = (float(rtol), float(atol))
        return _published(place, graph, signature, cases if compare else [], tolerance, overwrite=overwrite)


def _check_options(rtol: float, atol: float, metadata: Mapping[str, str]) -> None:
    if not all(isinstance(one, (int, float)) and one >= 0 for one in (rtol, atol)):
        raise UsageError(f"invalid rtol={rtol!r}, atol={atol!r}: expected numbers >= 0")
    for name, value in metadata.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"metadata has {name!r}: {value!r:.60}: names and values must be strings")


def _exported(
    model: torch.nn.Module, example: Example, names: Sequence[str] | None, opset: int | None, drop: bool
) -> tuple[ir.Model, Signature, list[Case]]:
    """Run the model on the example, and on resized ones if sizes are dynamic; then export it."""
    with kept_buffers(model):
        extents = example.extents()
        cases = [_case(model, example, extents, names, "")]
        if extents:
            # Prefer smaller sizes (at least 2), because a model may limit its sizes.
            other = {size: extent - 1 if extent > 2 else extent + 1 for size, extent in extents.items()}
            remedy = "; omit fixed sizes from dynamic="
            cases.append(_case(model, example.resized(other), other, names, remedy))
    inputs, outputs = cases[0].inputs, cases[0].outputs
    if both := sorted(set(example.names) & set(outputs)):
        raise UsageError(
            f"{', '.join(both)}: an input and an output share a name; give input_names= or output_names="
        )
    graph, symbols = graph_of(model, example, opset)
    named(graph, example.names, tuple(outputs), symbols)
    if drop:
        for value in [one for one in graph.graph.inputs if not one.uses()]:
            graph.graph.inputs.remove(value)
    return graph, Signature(_specs(graph.graph.inputs, inputs), _specs(graph.graph.outputs, outputs)), cases


def _recorded(model: torch.nn.Module) -> tuple[Any, Any]:
    known = recorded_call(bare_module(model))
    if known is None:
        raise UsageError("to_onnx needs inputs: give example inputs")
    return known.inputs, known.dynamic


def _proto(model: torch.nn.Module, inputs: Any, **options: Any) -> Any:
    """Return the ModelProto that would be written."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="torchrelay-onnx-") as folder:
        to_onnx(model, inputs, Path(folder) / "model.onnx", **options)
        return onnx.load(str(Path(folder) / "model.onnx"))


def _specs(values: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    found = []
    for value in values:
        name, tensor = value.name, tensors[value.name]
        dims = value.shape if value.shape is not None else tensor.shape
        shape = tuple(dim if isinstance(dim, int) else str(dim.value or f"{name}_{at}")
                      for at, dim in enumerate(dims))  # fmt: skip
        found.append(TensorSpec(name, shape, str(tensor.dtype).removeprefix("torch.")))
    return tuple(found)


def _describe(graph: ir.Model, signature: Signature, metadata: Mapping[str, str]) -> None:
    own = {"torchrelay.version": torchrelay.__version__, SIGNATURE: json.dumps(signature.to_json())}
    graph.metadata_props.update({**own, **metadata})
    graph.producer_name, graph.producer_version = "torchrelay", torchrelay.__version__
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()  # stack traces contain local paths
    for initializer in graph.graph.initializers.values():
        initializer.metadata_props.clear()


def _published(
    place: Path | str,
    graph: ir.Model,
    signature: Signature,
    cases: Sequence[Case],
    tolerance: tuple[float, float],
    *,
    overwrite: bool,
) -> OnnxFile:
    name = place.name if isinstance(place, Path) else place.rpartition("/")[2]
    difference, nbytes = 0.0, 0
    old: list[Path] = []

    def write(folder: Path) -> None:
        nonlocal difference, nbytes
        _save(graph, folder / name)
        _check(folder / name)
        difference = _compared(folder / name, cases, tolerance) if cases else 0.0
        nbytes = sum(one.stat().st_size for one in folder.iterdir())
        old.extend(_weights_beside(place) if isinstance(place, Path) else [])

    where = str(publish(place, write, overwrite=overwrite, several=True))
    for one in old:
        one.unlink(missing_ok=True)
    extents = tuple(dict(case.extents) for case in cases)
    return OnnxFile(where, signature, graph.opset_imports[""], nbytes, extents, difference)


def _save(graph: ir.Model, path: Path) -> None:
    """Write the file, and external weights if they are too large."""
    import onnx_ir as ir

    tensors = [one.const_value for one in graph.graph.initializers.values()]
    if sum(one.nbytes for one in tensors if one is not None) < EXTERNAL_FROM_BYTES:
        ir.save(graph, path)
    else:
        ir.save(graph, path, external_data=f"{path.name}.{secrets.token_hex(6)}.data")


def _check(path: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise UsageError(
            f"ONNX's checker rejected the exported model: {' '.join(str(error).split()):.300}"
        ) from error


@dataclass(frozen=True)
class Case:
    """Inputs with torch's outputs."""

    extents: Mapping[str, int]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]


def _compared(path: Path, cases: Sequence[Case], tolerance: tuple[float, float]) -> float:
    """Return the largest difference; raises UsageError if it exceeds the tolerance, or a run fails."""
    session = _session(path)
    taken = [one.name for one in session.get_inputs()]
    worst = 0.0
    for case in cases:
        try:
            found = session.run(None, {name: case.inputs[name].numpy() for name in taken})
        except Exception as error:
            raise UsageError(_not_run(error)) from error
        for (name, wanted), answer in zip(case.outputs.items(), found, strict=True):
            result = torch.from_numpy(answer)
            where = (
                ", ".join(f"{size} {extent}" for size, extent in case.extents.items())
                or "the inputs as given"
            )
            if result.shape != wanted.shape or result.dtype != wanted.dtype:
                raise UsageError(
                    f"output {name!r} is {result.dtype} {list(result.shape)} in ONNX and {wanted.dtype} "
                    f"{list(wanted.shape)} in torch, with {where}: nothing was written"
                )
            rtol, atol = tolerance if wanted.is_floating_point() else (0.0, 0.0)
            ours, theirs = result.double(), wanted.double()
            apart = (ours - theirs).abs().nan_to_num(nan=0.0, posinf=float("inf"))
            apart[ours == theirs] = 0.0
            greatest = float(apart.max()) if apart.numel() else 0.0
            if not torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
                raise UsageError(
                    f"output {name!r} differs by up to {greatest:.3g} between ONNX and torch, with {where} "
                    f"(allowed: {atol:g} + {rtol:g} of the value): nothing was written"
                )
            worst = max(worst, greatest)
    return worst


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
    leaves = pytree.tree_flatten_with_path(answer)[0]
    own = leaf_names([name_of_path(path) or "output" for path, leaf in leaves if leaf is not None])
    tensors = [leaf for _, leaf in leaves if leaf is not None]
    for name, leaf in zip(own, tensors, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(f"forward returns {leaf!r:.60} as {name!r}: ONNX supports tensors only")
    if not tensors:
        raise UsageError("forward returns no tensor, so there is nothing to export")
    chosen = chosen_names("output_names", names, own)
    outputs = dict(zip(chosen, (one.detach().clone() for one in tensors), strict=True))
    return Case(extents, dict(zip(example.names, inputs, strict=True)), outputs)


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
        f"onnxruntime cannot run the exported model, so nothing was written: {reason:.300}; "
        "compare=False skips the comparison"
    )
