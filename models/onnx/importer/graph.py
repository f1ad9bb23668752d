"""Read an ONNX file, check it, and convert it to executable graphs, which are free of protobuf.

One pass over all graphs reports all unsupported operators at once, and missing values and cycles by name.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import DamagedError, StorageError, UsageError, install_command
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.models.onnx.importer import tensors as limits
from torchrelay.models.onnx.importer.tensors import (
    DTYPES,
    FLOAT4,
    NARROW_BITS,
    STRING,
    check_made,
    stored_sparse,
    stored_tensor,
)
from torchrelay.records import dataclass


def _texts(message: Any, depth: int = 0) -> Iterable[Any]:
    """Yield the texts in a message but its comments; raises UsageError for graphs nested too deeply."""
    depth += message.DESCRIPTOR.name == "GraphProto"
    if depth > limits.MAX_DEPTH + 1:
        raise UsageError(f"the model nests graphs more than {limits.MAX_DEPTH} deep")
    for one in message.DESCRIPTOR.fields:
        if one.type not in (one.TYPE_STRING, one.TYPE_MESSAGE) or one.name == "doc_string":
            continue
        held = getattr(message, one.name)
        if isinstance(held, (str, bytes)):
            yield held
        elif not hasattr(held, "DESCRIPTOR"):  # several
            for inside in held:
                yield from _texts(inside, depth) if hasattr(inside, "DESCRIPTOR") else [inside]
        elif message.HasField(one.name):
            yield from _texts(held, depth)


def _inner_graphs(node: Any) -> list[Any]:
    """Return the graphs among the attributes of a node."""
    return [
        graph for one in node.attribute for graph in [*([one.g] if one.HasField("g") else []), *one.graphs]
    ]


KNOWN_OPSET = 28
"""The newest implemented operator set."""
OLDEST_OPSET = 7
"""Older operator sets are converted to this one, because their broadcasting rules differ."""
_Name = tuple[str, str, str]
"""Domain, name and overload of a function."""
KNOWN_DOMAINS = {"": KNOWN_OPSET, "ai.onnx.ml": 6, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}


def read_model(source: Any) -> tuple[Any, Path | None]:
    """Read a ModelProto, and return it with the folder of its external data, which is not read."""
    try:
        import onnx
        import onnx.external_data_helper
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(f"reading ONNX files needs the package onnx: {install_command('onnx')}") from error
    if isinstance(source, onnx.ModelProto):
        return source, None
    if hasattr(source, "model_proto"):  # torch.onnx.ONNXProgram
        return source.model_proto, None
    if isinstance(source, bytes | bytearray | memoryview):
        content, what, folder = bytes(source), "these bytes", None
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        what, folder = str(path), path.absolute().parent
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    else:
        raise UsageError(f"expected a path, bytes or a ModelProto, not {type(source).__name__}")
    try:
        model = onnx.ModelProto.FromString(content)
    except (DecodeError, RecursionError, ValueError) as error:
        raise DamagedError(f"{what}: this is not an ONNX model ({error})") from error
    if not model.HasField("graph"):
        raise DamagedError(f"{what}: this is not an ONNX model (it has no graph)")
    return model, folder


def _opsets(model: Any) -> dict[str, int]:
    """Return the version of each domain."""
    return {_domain_of(one): one.version for one in model.opset_import} or {"": 1}


def _domain_of(proto: Any) -> str:
    """Return the domain of a node, function or operator set; "" for the main one."""
    return "" if proto.domain == "ai.onnx" else str(proto.domain)


def _known_model(model: Any) -> Any:
    """Return the model in supported operator sets, with functions inlined; raises UsageError."""
    import onnx

    if not model.HasField("graph"):
        raise DamagedError("the model has no graph")
    for part in [model.graph, *model.functions, *model.opset_import]:
        for text in _texts(part):
            if not isinstance(text, str):
                raise DamagedError(
                    f"the model has a name that is not text, {text[:20]!r}: the file is damaged"
                )
    if model.ir_version > onnx.IR_VERSION:
        raise UsageError(
            f"the file has IR version {model.ir_version}; the installed onnx {onnx.__version__} knows up to"
            f" {onnx.IR_VERSION}: install a newer onnx"
        )
    if len(model.functions):
        model = _inlined(model)
    version = _opsets(model).get("", KNOWN_OPSET)
    if version < OLDEST_OPSET:
        return _converted(model, version, OLDEST_OPSET)
    if version > KNOWN_OPSET and _newer_than_known(onnx, model, version):
        return _converted(model, version, KNOWN_OPSET)
    return model


def _newer_than_known(onnx: Any, model: Any, version: int) -> bool:
    """Return True if an operator has changed after the newest supported set; UsageError if unknown."""
    if version > onnx.defs.onnx_opset_version():
        raise UsageError(
            f"the file uses operator set {version}; torchrelay knows up to {KNOWN_OPSET}, and the installed "
            f"onnx {onnx.__version__} up to {onnx.defs.onnx_opset_version()}, so that it cannot be "
            f"converted: export the model with opset_version={KNOWN_OPSET} or less"
        )
    kinds = {node.op_type for node in model.graph.node if _domain_of(node) == ""}
    return any(
        onnx.defs.has(kind) and onnx.defs.get_schema(kind, version, "").since_version > KNOWN_OPSET
        for kind in kinds
    )


def _converted(model: Any, version: int, target: int) -> Any:
    from onnx import version_converter

    try:
        return version_converter.convert_version(model, target)
    except Exception as error:
        raise UsageError(
            f"the file uses operator set {version}, and onnx cannot convert it to {target}: "
            f"{_first_line(error)}"
        ) from error


def _inlined(model: Any) -> Any:
    """Inline functions; UsageError for recursive ones, and for those that expand to more than the memory."""
    from onnx import inliner

    bodies = {
        _kind(one, one.name): Counter(_kind(node, node.op_type) for node in _nodes(one.node))
        for one in model.functions
    }
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
    nodes = sum(size.get(_kind(one, one.op_type), 1) for one in _nodes(model.graph.node))
    if nodes > limits.MAX_NODES:
        raise UsageError(
            f"the functions of the model expand to {nodes} operators, more than {limits.MAX_NODES}: "
            "if the file is trustworthy, raise torchrelay.models.onnx.importer.tensors.MAX_NODES"
        )
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise UsageError(f"the functions of the model cannot be inlined: {_first_line(error)}") from error


def _kind(one: Any, name: str) -> _Name:
    return _domain_of(one), name, getattr(one, "overload", "")


def _nodes(nodes: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the nodes and those of their inner graphs."""
    if depth > limits.MAX_DEPTH:
        raise UsageError(f"the model nests graphs more than {limits.MAX_DEPTH} deep")
    for node in nodes:
        yield node
        for inner in _inner_graphs(node):
            yield from _nodes(inner.node, depth + 1)


@dataclass(frozen=True, eq=False)
class GraphNode:
    """One operator; an omitted input or output has an empty name.

    `attributes` are numbers, texts, tuples of these, CPU tensors and graphs. `version` is that of the
    operator set.
    """

    operator: str
    domain: str
    version: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    narrow: Mapping[int, int] = field(default_factory=dict)
    """Input position -> declared element type that torch does not have."""

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.operator}" if self.domain else self.operator
        first = next((one for one in self.outputs if one), "")
        return f"{kind} {self.name!r}" if self.name else f"{kind} (which computes {first!r})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Operators in topological order.

    `stored` maps names of values in the file to their location in the module: initializers to their state
    dict key, constants to a number. `captured` are names used from the graphs around this one.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    initializers: Mapping[str, str]
    constants: Mapping[str, int]
    captured: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # immutable, so copies of a module share it


@dataclass(frozen=True, eq=False)
class ModelContent:
    """Contents of a file: the main graph, its tensors, inputs and outputs."""

    graph: Graph
    initializers: Mapping[str, torch.Tensor]
    constants: tuple[torch.Tensor, ...]
    signature: Signature
    uses: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)
    """State dict key -> (operator, input position) of all uses of that initializer."""


def _in_order(graph: Any, stored: frozenset[str], outer: frozenset[str]) -> tuple[list[Any], set[str]]:
    """Return the nodes in topological order, and the names that they use from `outer`; raises UsageError."""
    makers: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in makers or name in stored:
                raise UsageError(f"graph {graph.name!r} defines the value {name!r} twice")
            makers[name] = at
    needs = [_needed(node) for node in graph.node]
    missing = sorted({name for need in needs for name in need} - makers.keys() - stored - outer)
    unmade = [one.name for one in graph.output if one.name not in makers.keys() | stored | outer]
    if missing or unmade:
        names = ", ".join(map(repr, [*missing, *unmade][:20]))
        raise UsageError(f"graph {graph.name!r} uses undefined values: {names}")
    captured = {name for need in needs for name in need} & outer - makers.keys() - stored
    before = [{makers[name] for name in need if name in makers} for need in needs]
    if all(max(found, default=-1) < at for at, found in enumerate(before)):
        return list(graph.node), captured  # already ordered, as the format requires
    try:
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError as error:
        node = graph.node[error.args[1][0]]
        raise UsageError(
            f"graph {graph.name!r} has a cycle of {len(error.args[1]) - 1} operators, such as "
            f"{node.op_type} {node.name!r}, which computes {list(node.output)[:3]}"
        ) from None
    return [graph.node[at] for at in order], captured


def _needed(node: Any) -> set[str]:
    """Return the names that a node uses, including those captured by its inner graphs."""
    found = set(filter(None, node.input))
    for graph in _inner_graphs(node):
        own = {one.name for side in (graph.input, graph.initializer) for one in side}
        own |= {one.values.name for one in graph.sparse_initializer}
        own |= {name for inside in graph.node for name in inside.output}
        found |= {one.name for one in graph.output}.union(*map(_needed, graph.node)) - own
    return found


def content_of(model: Any, folder: Path | None, supported: Collection[tuple[str, str]]) -> ModelContent:
    """Convert a ModelProto, using no more memory than the size of the file; UsageError, DamagedError."""
    model = _known_model(model)
    versions = _opsets(model)
    # Raise UsageError with all unsupported operators and how often they occur.
    kinds = Counter((_domain_of(node), node.op_type) for node in _nodes(model.graph.node))
    missing = {kind: count for kind, count in kinds.items() if kind not in supported}
    if missing:
        names = ", ".join(
            f"{domain + '.' if domain else ''}{name} ({count} time{'s' * (count > 1)})"
            for (domain, name), count in sorted(missing.items())
        )
        raise UsageError(
            f"{len(missing)} operator{'s' * (len(missing) > 1)} of this model cannot be imported: {names}. "
            "Cut the model before them with outputs="
        )
    for domain in {domain for domain, _ in kinds} & KNOWN_DOMAINS.keys():
        if domain and versions.get(domain, 1) > KNOWN_DOMAINS[domain]:
            raise UsageError(
                f"the file uses version {versions[domain]} of {domain}, newer than the supported version "
                f"{KNOWN_DOMAINS[domain]}"
            )
    return _Builder(versions, folder).content(model.graph)


class _Builder:
    def __init__(self, versions: dict[str, int], folder: Path | None) -> None:
        self._versions, self._folder = versions, folder
        self._initializers: dict[str, torch.Tensor] = {}
        self._constants: list[torch.Tensor] = []
        self._uses: dict[str, set[tuple[str, int]]] = {}
        self._narrow: dict[str, int] = {}
        self._dense = 0

    def content(self, proto: Any) -> ModelContent:
        graph = self.graph(proto, frozenset(), {})
        uses = {key: frozenset(found) for key, found in self._uses.items()}
        return ModelContent(graph, self._initializers, tuple(self._constants), _signature(proto, graph), uses)

    def graph(self, proto: Any, outer: frozenset[str], outer_keys: dict[str, str]) -> Graph:
        """Convert a graph and its inner graphs; `outer` are the names of the graphs around it."""
        initializers = {one.name: self._store(proto, one.name, one) for one in proto.initializer}
        for one in proto.sparse_initializer:
            initializers[one.values.name] = self._store(proto, one.values.name, one)
        declared = {one.name: one.type.tensor_type.elem_type for one in [*proto.input, *proto.value_info]}
        declared.update((one.name, one.data_type) for one in proto.initializer)
        self._narrow.update((name, number) for name, number in declared.items() if number in NARROW_BITS)
        inputs = tuple(one.name for one in proto.input if one.name not in initializers)
        for name, times in Counter([*inputs, *initializers]).items():
            if times > 1:
                raise UsageError(f"graph {proto.name!r} has {name!r} twice among its inputs and initializers")
        stored = frozenset([*inputs, *initializers])
        ordered, captured = _in_order(proto, stored, outer)
        visible = outer | stored | {name for node in ordered for name in node.output if name}
        keys = {**outer_keys, **initializers}
        constants: dict[str, int] = {}
        nodes = []
        for one in ordered:
            if one.op_type == "Constant" and _domain_of(one) == "" and self._constant(one, constants):
                continue
            nodes.append(self._node(one, visible, keys))
        outputs = tuple(one.name for one in proto.output)
        inner = [one for node in nodes for one in node.attributes.values() if isinstance(one, Graph)]
        taken = set(outputs) & outer | {name for one in inner for name in one.captured}
        captured |= taken - (visible - outer)
        return Graph(
            proto.name, inputs, outputs, tuple(nodes), initializers, constants, tuple(sorted(captured))
        )

    def _store(self, graph: Any, name: str, proto: Any) -> str:
        if not name:
            raise UsageError(f"graph {graph.name!r} has an initializer without a name")
        key = name
        while key in self._initializers:
            key = f"{graph.name}/{key}"
            if len(key) > 4096:
                raise UsageError(f"initializer {name!r} occurs several times")
        sparse = hasattr(proto, "values")
        if not sparse and proto.data_type == STRING:
            raise UsageError(f"initializer {name!r} has texts, which torch tensors do not support")
        if sparse:
            self._dense += max(0, math.prod(proto.dims))
            check_made("the sparse initializers together", [self._dense])
        self._initializers[key] = stored_sparse(proto) if sparse else stored_tensor(proto, self._folder)
        return key

    def _constant(self, proto: Any, constants: dict[str, int]) -> bool:
        """Store the tensor of a Constant; returns False if it contains texts."""
        made = self._attributes(proto, frozenset(), {})
        value = next(iter(made.values()), None)
        texts = isinstance(value, tuple) and value and isinstance(value[0], str)
        if value is None or texts or made.keys() & {"value_string", "value_strings"}:
            return False
        if not isinstance(value, torch.Tensor):
            name = next(iter(made))
            value = torch.tensor(value, dtype=torch.int64 if name.startswith("value_int") else torch.float32)
        constants[proto.output[0]] = len(self._constants)
        self._constants.append(value)
        return True

    def _node(self, proto: Any, visible: frozenset[str], keys: dict[str, str]) -> GraphNode:
        domain = _domain_of(proto)
        for at, name in enumerate(proto.input):
            if name in keys:
                self._uses.setdefault(keys[name], set()).add((proto.op_type, at))
        return GraphNode(
            proto.op_type, domain, self._versions.get(domain, 1), proto.name, tuple(proto.input),
            tuple(proto.output), self._attributes(proto, visible, keys),
            {at: self._narrow[name] for at, name in enumerate(proto.input) if name in self._narrow},
        )  # fmt: skip

    def _attributes(self, proto: Any, visible: frozenset[str], keys: dict[str, str]) -> dict[str, Any]:
        return {one.name: self._attribute(one, proto, visible, keys) for one in proto.attribute}

    def _attribute(self, proto: Any, node: Any, visible: frozenset[str], keys: dict[str, str]) -> Any:
        if proto.type in _ATTRIBUTES:
            return _ATTRIBUTES[proto.type](proto)
        match proto.type:
            case 4 if proto.t.data_type == STRING:
                return tuple(map(_text, proto.t.string_data))
            case 4:
                return stored_tensor(proto.t, self._folder)
            case 5:
                return self.graph(proto.g, visible, keys)
            case 9:
                return tuple(stored_tensor(one, self._folder) for one in proto.tensors)
        raise UsageError(f"attribute {proto.name!r} of {node.op_type} {node.name!r} has an unsupported kind")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


_ATTRIBUTES: dict[int, Callable[[Any], Any]] = {
    1: lambda proto: float(proto.f),
    2: lambda proto: int(proto.i),
    3: lambda proto: _text(proto.s),
    6: lambda proto: tuple(map(float, proto.floats)),
    7: lambda proto: tuple(map(int, proto.ints)),
    8: lambda proto: tuple(map(_text, proto.strings)),
    11: lambda proto: stored_sparse(proto.sparse_tensor),
    13: lambda proto: proto.tp.SerializeToString(),
}
"""Attributes without a folder or a graph, by AttributeProto.type."""


def _signature(proto: Any, graph: Graph) -> Signature:
    declared = {one.name: _spec(one) for one in [*proto.input, *proto.output]}
    return Signature(*(tuple(map(declared.__getitem__, names)) for names in (graph.inputs, graph.outputs)))


def _spec(proto: Any) -> TensorSpec:
    kind = proto.type.tensor_type
    shape: list[Size] = []
    for at, one in enumerate(kind.shape.dim):
        fixed = one.HasField("dim_value") and one.dim_value >= 0
        shape.append(one.dim_value if fixed else one.dim_param or f"{proto.name}_{at}")
    number = kind.elem_type
    narrow = {21: "uint4", 22: "int4", 25: "uint2", 26: "int2", FLOAT4: "float4_e2m1", STRING: "string"}
    known = str(DTYPES[number]).removeprefix("torch.") if number in DTYPES else narrow.get(number, "unknown")
    return TensorSpec(proto.name, tuple(shape), known)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
