"""`torchrelay.to_onnx`: a module as an ONNX file that was seen to answer as the module does.

Weights beside the file have a name that no other export has, and come first: the file that names them
appears last, at once, so that whoever reads finds an old model or a new one, never parts of both.
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

import torchrelay
from torchrelay.checkpoint.files.publish import Where, check_free, expanded, publish
from torchrelay.errors import UsageError, install_command
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.models.archive.states import recorded_call
from torchrelay.models.onnx.exporter.graph import (
    bare_module,
    check_apart,
    graph_of,
    kept_buffers,
    named,
    own_copy,
    without_unused,
)
from torchrelay.models.onnx.exporter.inputs import (
    Case,
    Dynamic,
    Example,
    Tolerance,
    cases_of,
    compare,
    example_of,
)
from torchrelay.models.package.compile import undisturbing
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir


def place_of(where: Where, *, overwrite: bool) -> Path | str:
    """Where an ONNX file is to lie, which is free; touches nothing. Raises UsageError."""
    place = expanded(where, "the ONNX file")
    check_free(place, overwrite=overwrite)
    return place


def _weights_beside(path: Path) -> list[Path]:
    """Weights that an export put beside a file of this name, and that the file there names.

    Others may be of an export that goes on at the same time, whose file comes next.
    """
    ours = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{12}}\.data")
    found = [one for one in path.parent.iterdir() if ours.fullmatch(one.name)]
    if not found or not path.is_file() or not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [one for one in found if content.find(os.fsencode(one.name)) >= 0]


_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Raise UsageError with the remedy where one is missing; imports none."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX files need {', '.join(missing)}: {install_command('onnx')}")


RTOL, ATOL = 1e-3, 1e-4
SIGNATURE = "torchrelay.signature"
EXTERNAL_FROM_BYTES = 1_900_000_000
"""A file of protobuf ends at 2 GiB; from here on weights lie beside it."""


@dataclass(frozen=True)
class OnnxFile:
    """What was written; `compared`: the sizes in which onnxruntime and torch agreed up to `difference`."""

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
    """Write a module in evaluation mode as an ONNX file, at a path or fsspec URL, or raise and write nothing.

    Returns an OnnxFile; without a path nothing is written, and an `onnx.ModelProto` comes back.

    `inputs` are an example: a tensor, a sequence of the arguments of `forward`, or a mapping of them by name;
    nested, too. Without any they are those that `compile(model, inputs)` was called with. Names are those of
    the parameters of `forward` and of the keys of what it returns. The first dimension is the `batch`, of any
    size, where it is as long as that of the first input; `dynamic=False` fixes all sizes,
    `dynamic={"tokens": {0: "batch", 1: "time"}}` names those of an input (one name, one size). `drop_unused`
    leaves inputs out that no answer depends on.

    The file passes ONNX's checker, and onnxruntime answers as torch on the CPU in the sizes of the example
    and in others, where |onnx - torch| <= atol + rtol * |torch| (whole numbers: equal); with `compare=False`
    the checker alone looks. Initializers have the names and values of the module's states. Above 1.9 GB they
    lie in a file beside it. `metadata` goes into the file, as do its Signature and torchrelay's version.

    It works on a copy on the CPU: the model, its mode, device and buffers, and all random streams stay as
    they are. Raises UsageError for a taken name, a model that torch cannot export, answers that differ, and
    where the extra is missing; StorageError.
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
    tolerance = _checked(rtol, atol)
    for name, value in (metadata or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"metadata has {name!r}: {value!r:.60}: names and values are texts")
    with undisturbing():
        copied = own_copy(model)
        with kept_buffers(copied):
            cases = cases_of(copied, example, output_names)
        check_apart(example.names, tuple(cases[0].outputs))
        graph, signature = _graph(copied, example, cases, opset, drop_unused=drop_unused)
        _describe(graph, signature, metadata or {})
        content = _OnnxContent(graph, signature, cases if compare else (), tolerance)
        return _published(place, content, overwrite=overwrite)


def _recorded(model: torch.nn.Module) -> tuple[Any, Any]:
    known = recorded_call(bare_module(model))
    if known is None:
        raise UsageError(
            "to_onnx needs inputs: give an example, or call torchrelay.compile(model, inputs) before"
        )
    return known.inputs, known.dynamic


def _proto(model: torch.nn.Module, inputs: Any, **options: Any) -> Any:
    """The content of the file that it would write."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="torchrelay-onnx-") as folder:
        to_onnx(model, inputs, Path(folder) / "model.onnx", **options)
        return onnx.load(str(Path(folder) / "model.onnx"))


def _checked(rtol: float, atol: float) -> Tolerance:
    if not all(isinstance(one, (int, float)) and one >= 0 for one in (rtol, atol)):
        raise UsageError(f"rtol={rtol!r}, atol={atol!r}: give numbers from 0")
    return Tolerance(float(rtol), float(atol))


def _graph(
    model: torch.nn.Module, example: Example, cases: Sequence[Case], opset: int | None, *, drop_unused: bool
) -> tuple[ir.Model, Signature]:
    graph, symbols = graph_of(model, example, opset)
    named(graph, example.names, tuple(cases[0].outputs), symbols)
    if drop_unused:
        without_unused(graph)
    return graph, Signature(
        _specs(graph.graph.inputs, cases[0].inputs), _specs(graph.graph.outputs, cases[0].outputs)
    )


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
        node.metadata_props.clear()  # stack traces, with paths of this machine
    for initializer in graph.graph.initializers.values():
        initializer.metadata_props.clear()


@dataclass(frozen=True)
class _OnnxContent:
    graph: ir.Model
    signature: Signature
    cases: Sequence[Case]
    tolerance: Tolerance


def _published(place: Path | str, content: _OnnxContent, *, overwrite: bool) -> OnnxFile:
    name = place.name if isinstance(place, Path) else place.rpartition("/")[2]
    found: list[Any] = []
    old: list[Path] = []

    def write(folder: Path) -> None:
        _save(content.graph, folder / name)
        _check(folder / name)
        cases = content.cases
        difference = compare(folder / name, cases, content.tolerance) if cases else 0.0
        found.extend((sum(one.stat().st_size for one in folder.iterdir()), difference))
        old.extend(_weights_beside(place) if isinstance(place, Path) else [])

    where = str(publish(place, write, overwrite=overwrite, several=True))
    for one in old:
        one.unlink(missing_ok=True)
    extents = tuple(dict(case.extents) for case in content.cases)
    nbytes, difference = found
    return OnnxFile(where, content.signature, content.graph.opset_imports[""], nbytes, extents, difference)


def _save(graph: ir.Model, path: Path) -> None:
    """Write the file, and the weights beside it where they are too many."""
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
            f"ONNX's checker refuses the exported model: {' '.join(str(error).split()):.300}"
        ) from error
