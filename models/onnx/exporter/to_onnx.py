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
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torchrelay
from torchrelay.checkpoint.files.publish import check_free
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import FILE
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec, local_directory
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
from torchrelay.models.package.export import undisturbing
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir


_WHAT = "the ONNX file"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class ExportTarget:
    """A place for one file; `where` as people write it. Exactly one of `path` and `store` is there."""

    where: str
    name: str
    overwrite: bool
    path: Path | None = None
    store: ObjectStorage | None = None

    @property
    def weights(self) -> str:
        """A new name for weights beside the file."""
        return f"{self.name}.{secrets.token_hex(6)}.data"

    def check(self) -> None:
        """Raise UsageError where the name is taken."""
        if self.path is not None:
            check_free(self.path, overwrite=self.overwrite, directory=False)
        elif self.store is not None and not self.overwrite and self.store.stat(self.name) is not None:
            raise UsageError(_taken(self.where))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for the files to be; on the same file system, for a local target."""
        if self.path is None:
            with tempfile.TemporaryDirectory(prefix="torchrelay-onnx-") as text:
                yield Path(text)
            return
        folder = self.path.with_name(f".tmp-{secrets.token_hex(8)}")
        try:
            folder.mkdir(parents=True)
            yield folder
        except OSError as error:
            if isinstance(error, (StorageError, UsageError)):
                raise
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, weights: str | None) -> None:
        """Put the file in the folder, and its `weights`, in place; raises UsageError, StorageError."""
        if self.path is not None:
            self._move(self.path, folder, weights)
        elif self.store is not None:
            self._send(self.store, folder, weights)

    def _move(self, path: Path, folder: Path, weights: str | None) -> None:
        made, old = folder / path.name, _weights_beside(path)
        for name in (path.name, weights):
            if name is not None:
                _sync(folder / name)
        if weights is not None:
            (folder / weights).rename(path.with_name(weights))
        try:
            made.replace(path) if self.overwrite else os.link(made, path)
        except FileExistsError:
            path.with_name(weights).unlink() if weights is not None else None
            raise UsageError(_taken(self.where)) from None
        _sync(path.parent)
        for one in old:
            one.unlink(missing_ok=True)

    def _send(self, store: ObjectStorage, folder: Path, weights: str | None) -> None:
        if weights is not None:
            handle = store.open_exclusive(weights)
            with (folder / weights).open("rb") as file:
                at = 0
                while piece := file.read(_PIECE_BYTES):
                    handle.write_at(at, memoryview(piece))
                    at += len(piece)
            handle.sync_file()
            handle.close()
        data = (folder / self.name).read_bytes()
        if self.overwrite:
            store.replace(self.name, data)
            return
        try:
            store.link_exclusive(self.name, data)
        except FileExistsError:
            raise UsageError(_taken(self.where)) from None


def target_of(where: str | os.PathLike[str], *, overwrite: bool) -> ExportTarget:
    """What a user called a place; touches nothing. Raises UsageError."""
    text = os.fspath(where) if isinstance(where, (str, os.PathLike)) else where
    if isinstance(text, str) and is_url(text) and not text.startswith(FILE):
        parent, _, name = text.rpartition("/")
        if not name or parent.endswith("/"):
            raise UsageError(f"{_WHAT} {text!r} names no file: give a URL such as s3://bucket/model.onnx")
        return ExportTarget(text, name, overwrite, store=ObjectStorage.open(parent, _WHAT, "external"))
    path = local_directory(text.removeprefix(FILE) if isinstance(text, str) else text, _WHAT)
    return ExportTarget(str(path), path.name, overwrite, path=path)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _taken(where: str) -> str:
    return f"{where} exists already: choose another name, or overwrite=True (--overwrite)"


_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Raise UsageError with the remedy where one is missing; imports none."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX files need {', '.join(missing)}: pip install 'torchrelay[onnx]'")


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
    target = target_of(path, overwrite=overwrite)
    target.check()
    example = example_of(bare_module(model), inputs, input_names, dynamic)
    tolerance = _checked(rtol, atol)
    _check_texts(metadata or {})
    with undisturbing():
        copied = own_copy(model)
        with kept_buffers(copied):
            cases = cases_of(copied, example, output_names)
        check_apart(example.names, tuple(cases[0].outputs))
        graph, signature = _graph(copied, example, cases, opset, drop_unused=drop_unused)
        _describe(graph, signature, metadata or {})
        return _written(graph, signature, target, cases if compare else (), tolerance)


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


def _check_texts(metadata: Mapping[str, str]) -> None:
    for name, value in metadata.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"metadata has {name!r}: {value!r:.60}: names and values are texts")


def _describe(graph: ir.Model, signature: Signature, metadata: Mapping[str, str]) -> None:
    own = {"torchrelay.version": torchrelay.__version__, SIGNATURE: json.dumps(signature.to_json())}
    graph.metadata_props.update({**own, **metadata})
    graph.producer_name, graph.producer_version = "torchrelay", torchrelay.__version__
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    for initializer in graph.graph.initializers.values():
        initializer.metadata_props.clear()


def _written(
    graph: ir.Model, signature: Signature, target: ExportTarget, cases: Sequence[Case], tolerance: Tolerance
) -> OnnxFile:
    with target.scratch() as folder:
        weights = _save(graph, folder / target.name, target)
        _check(folder / target.name)
        difference = compare(folder / target.name, cases, tolerance) if cases else 0.0
        nbytes = sum(one.stat().st_size for one in folder.iterdir())
        target.publish(folder, weights)
    extents = tuple(dict(case.extents) for case in cases)
    return OnnxFile(target.where, signature, graph.opset_imports[""], nbytes, extents, difference)


def _save(graph: ir.Model, path: Path, target: ExportTarget) -> str | None:
    """Write the file, and the weights beside it where they are too many; returns their name."""
    import onnx_ir as ir

    tensors = [one.const_value for one in graph.graph.initializers.values()]
    if sum(one.nbytes for one in tensors if one is not None) < EXTERNAL_FROM_BYTES:
        ir.save(graph, path)
        return None
    weights = target.weights
    ir.save(graph, path, external_data=weights)
    return weights


def _check(path: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise UsageError(
            f"ONNX's checker refuses the exported model: {' '.join(str(error).split()):.300}"
        ) from error
