"""Read and check a ModelProto, and convert it to a supported operator set."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, StorageError, UsageError, install_command
from torchrelay.models.onnx.importer import tensors as limits


def check_readable(model: Any) -> None:
    """Raise DamagedError for names that are not text, UsageError for graphs nested too deeply."""
    found = [one.domain for one in model.opset_import]
    for function in model.functions:
        found += [function.name, function.domain, *function.input, *function.output]
        found += [name for node in function.node for name in _of_node(node, 0)]
    for name in [*found, *_of_graph(model.graph, 0)]:
        if not isinstance(name, str):
            raise DamagedError(f"the model has a name that is not text, {name[:20]!r}: the file is damaged")


def _of_graph(graph: Any, depth: int) -> Iterable[Any]:
    if depth > limits.MAX_DEPTH:
        raise UsageError(f"the model nests graphs more than {limits.MAX_DEPTH} deep")
    yield graph.name
    for one in [*graph.input, *graph.output, *graph.value_info]:
        yield one.name
        yield from (size.dim_param for size in one.type.tensor_type.shape.dim)
    for tensor in [*graph.initializer, *(one.values for one in graph.sparse_initializer)]:
        yield from _of_tensor(tensor)
    for node in graph.node:
        yield from _of_node(node, depth)


def _of_node(node: Any, depth: int) -> Iterable[Any]:
    yield from (node.name, node.domain, node.op_type, *node.input, *node.output)
    for attribute in node.attribute:
        yield attribute.name
        if attribute.HasField("t"):
            yield from _of_tensor(attribute.t)
    for graph in inner_graphs(node):
        yield from _of_graph(graph, depth + 1)


def inner_graphs(node: Any) -> list[Any]:
    """Return the graphs among the attributes of a node."""
    return [
        graph for one in node.attribute for graph in [*([one.g] if one.HasField("g") else []), *one.graphs]
    ]


def _of_tensor(tensor: Any) -> Iterable[Any]:
    yield tensor.name
    yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))


KNOWN_OPSET = 28
"""The newest implemented operator set."""
OLDEST_OPSET = 7
"""Older operator sets are converted to this one, because their broadcasting rules differ."""
_Name = tuple[str, str, str]
"""Domain, name and overload of a function."""
KNOWN_DOMAINS = {"": KNOWN_OPSET, "ai.onnx.ml": 6, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}


def need_onnx() -> Any:
    """Import the package onnx; raises UsageError if it is not installed."""
    try:
        import onnx
        import onnx.external_data_helper
    except ImportError as error:
        raise UsageError(f"reading ONNX files needs the package onnx: {install_command('onnx')}") from error
    return onnx


def read_model(source: Any) -> tuple[Any, Path | None]:
    """Read a ModelProto from a path, bytes or a ModelProto; returns it with the folder of its external data.

    External tensors are not read. Raises StorageError for an unreadable file, DamagedError if it is not an
    ONNX model, UsageError if this version does not support it.
    """
    onnx = need_onnx()
    if isinstance(source, onnx.ModelProto):
        return source, None
    if hasattr(source, "model_proto"):  # torch.onnx.ONNXProgram
        return source.model_proto, None
    if isinstance(source, bytes | bytearray | memoryview):
        return _parsed(onnx, bytes(source), "these bytes"), None
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"expected a path, bytes or a ModelProto, not {type(source).__name__}")
    path = Path(source)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    return _parsed(onnx, content, str(path)), path.absolute().parent


def _parsed(onnx: Any, content: bytes, what: str) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.ModelProto.FromString(content)
    except (DecodeError, RecursionError, ValueError) as error:
        raise DamagedError(f"{what}: this is not an ONNX model ({error})") from error
    if not model.HasField("graph"):
        raise DamagedError(f"{what}: this is not an ONNX model (it has no graph)")
    return model


def opsets(model: Any) -> dict[str, int]:
    """Return the version of each domain."""
    return {domain_of(one): one.version for one in model.opset_import} or {"": 1}


def domain_of(proto: Any) -> str:
    """Return the domain of a node, function or operator set; "" for the main one."""
    return "" if proto.domain == "ai.onnx" else str(proto.domain)


def known_model(model: Any) -> Any:
    """Return the model in supported operator sets, with functions inlined or converted if needed.

    Raises UsageError for unsupported versions; nothing is run as another version.
    """
    onnx = need_onnx()
    if not model.HasField("graph"):
        raise DamagedError("the model has no graph")
    check_readable(model)
    if model.ir_version > onnx.IR_VERSION:
        raise UsageError(
            f"the file has IR version {model.ir_version}; the installed onnx {onnx.__version__} knows up to"
            f" {onnx.IR_VERSION}: install a newer onnx"
        )
    if len(model.functions):
        model = _inlined(onnx, model)
    version = opsets(model).get("", KNOWN_OPSET)
    if version < OLDEST_OPSET:
        return _converted(onnx, model, version, OLDEST_OPSET)
    if version > KNOWN_OPSET and _newer_than_known(onnx, model, version):
        return _converted(onnx, model, version, KNOWN_OPSET)
    return model


def _newer_than_known(onnx: Any, model: Any, version: int) -> bool:
    """Return True if an operator has changed after the newest supported set; UsageError if unknown."""
    if version > onnx.defs.onnx_opset_version():
        raise UsageError(
            f"the file uses operator set {version}; torchrelay knows up to {KNOWN_OPSET}, and the installed "
            f"onnx {onnx.__version__} up to {onnx.defs.onnx_opset_version()}, so that it cannot be "
            f"converted: export the model with opset_version={KNOWN_OPSET} or less"
        )
    kinds = {node.op_type for node in model.graph.node if domain_of(node) == ""}
    return any(
        onnx.defs.has(kind) and onnx.defs.get_schema(kind, version, "").since_version > KNOWN_OPSET
        for kind in kinds
    )


def _converted(onnx: Any, model: Any, version: int, target: int) -> Any:
    from onnx import version_converter

    try:
        return version_converter.convert_version(model, target)
    except Exception as error:
        raise UsageError(
            f"the file uses operator set {version}, and onnx cannot convert it to {target}: "
            f"{_first_line(error)}"
        ) from error


def _inlined(onnx: Any, model: Any) -> Any:
    from onnx import inliner

    _check_functions(model)
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise UsageError(f"the functions of the model cannot be inlined: {_first_line(error)}") from error


def _check_functions(model: Any) -> None:
    """Raise UsageError for functions that are recursive, nested too deeply, or expand to too many operators.

    Called before functions are expanded, because a small file can expand to more than the memory.
    """
    bodies = {_kind(one, one.name): Counter(_called(one.node)) for one in model.functions}
    depth: dict[_Name, int] = {}
    size: dict[_Name, int] = {}
    try:
        order = list(
            TopologicalSorter({name: calls.keys() & bodies for name, calls in bodies.items()}).static_order()
        )
    except CycleError as error:
        raise UsageError(f"functions of the model call each other in a cycle: {error.args[1][:3]}") from None
    for name in order:
        depth[name] = 1 + max((depth[one] for one in bodies[name].keys() & depth.keys()), default=0)
        size[name] = sum(count * size.get(one, 1) for one, count in bodies[name].items())
        if depth[name] > limits.MAX_DEPTH:
            raise UsageError(
                f"function {name[1]!r} of the model nests calls more than {limits.MAX_DEPTH} deep"
            )
    nodes = sum(size.get(one, 1) for one in _called(model.graph.node))
    if nodes > limits.MAX_NODES:
        raise UsageError(
            f"the functions of the model expand to {nodes} operators, more than {limits.MAX_NODES}: "
            "if the file is trustworthy, raise torchrelay.models.onnx.importer.tensors.MAX_NODES"
        )


def _kind(one: Any, name: str) -> _Name:
    return domain_of(one), name, getattr(one, "overload", "")


def _called(nodes: Iterable[Any]) -> Iterator[_Name]:
    return (_kind(node, node.op_type) for node in _nodes(nodes))


def _nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes and those of their inner graphs, whose depth `check_readable` has limited."""
    for node in nodes:
        yield node
        for inner in inner_graphs(node):
            yield from _nodes(inner.node)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
