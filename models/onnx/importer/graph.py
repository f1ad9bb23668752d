"""Executable graphs: operators in order, built from a checked ModelProto and free of protobuf.

One pass over all graphs reports all unsupported operators at once, and missing values and cycles by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.models.onnx.importer import tensors as limits
from torchrelay.models.onnx.importer.model_file import KNOWN_DOMAINS, domain_of, inner_graphs, opsets
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

    @property
    def kind(self) -> tuple[str, str]:
        """Domain and operator."""
        return self.domain, self.operator


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


def in_order(graph: Any, stored: frozenset[str], outer: frozenset[str]) -> tuple[list[Any], set[str]]:
    """Return the nodes of a GraphProto in topological order, and the names that it uses from `outer`.

    `stored` are its inputs and initializers. Raises UsageError for undefined values, values defined twice,
    and cycles.
    """
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
        told = ", ".join(map(repr, [*missing, *unmade][:20]))
        raise UsageError(f"graph {graph.name!r} uses undefined values: {told}")
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


def _needed(node: Any, depth: int = 0) -> set[str]:
    """Return the names that a node uses, including those captured by its inner graphs."""
    if depth > limits.MAX_DEPTH:
        raise UsageError(f"{node.op_type} {node.name!r} has graphs more than {limits.MAX_DEPTH} deep")
    found = set(filter(None, node.input))
    for graph in inner_graphs(node):
        own = {one.name for side in (graph.input, graph.initializer) for one in side}
        own |= {one.values.name for one in graph.sparse_initializer}
        own |= {name for inside in graph.node for name in inside.output}
        wanted = {one.name for one in graph.output}
        found |= wanted.union(*(_needed(inside, depth + 1) for inside in graph.node)) - own
    return found


def content_of(model: Any, folder: Path | None, supported: Callable[[str, str], bool]) -> ModelContent:
    """Convert a ModelProto, using no more memory than the size of the file; UsageError, DamagedError."""
    versions = opsets(model)
    _check_supported(model.graph, versions, supported)
    return _Builder(versions, folder).content(model.graph)


def _all_nodes(graph: Any, depth: int = 0) -> Iterable[Any]:
    if depth > limits.MAX_DEPTH:
        raise UsageError(f"graph {graph.name!r} is nested more than {limits.MAX_DEPTH} deep")
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _all_nodes(inner, depth + 1)


def _check_supported(graph: Any, versions: dict[str, int], supported: Callable[[str, str], bool]) -> None:
    """Raise UsageError with all unsupported operators and how often they occur."""
    missing = Counter((domain_of(node), node.op_type) for node in _all_nodes(graph))
    missing = Counter({kind: count for kind, count in missing.items() if not supported(*kind)})
    if missing:
        told = ", ".join(
            f"{domain + '.' if domain else ''}{name} ({count} time{'s' * (count > 1)})"
            for (domain, name), count in sorted(missing.items())
        )
        raise UsageError(
            f"{len(missing)} operator{'s' * (len(missing) > 1)} of this model cannot be imported: {told}. "
            "Cut the model before them with outputs="
        )
    used = {domain_of(node) for node in _all_nodes(graph)}
    for domain in used & KNOWN_DOMAINS.keys():
        if domain and versions.get(domain, 1) > KNOWN_DOMAINS[domain]:
            raise UsageError(
                f"the file uses version {versions[domain]} of {domain}, newer than the supported version "
                f"{KNOWN_DOMAINS[domain]}"
            )


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
        ordered, captured = in_order(proto, stored, outer)
        visible = outer | stored | {name for node in ordered for name in node.output if name}
        keys = {**outer_keys, **initializers}
        constants: dict[str, int] = {}
        nodes = []
        for one in ordered:
            if one.op_type == "Constant" and domain_of(one) == "" and self._constant(one, constants):
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
        domain = domain_of(proto)
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
        match proto.type:
            case 1:
                return float(proto.f)
            case 2:
                return int(proto.i)
            case 3:
                return proto.s.decode("utf-8", "replace")
            case 4:
                if proto.t.data_type == STRING:
                    return tuple(one.decode("utf-8", "replace") for one in proto.t.string_data)
                return stored_tensor(proto.t, self._folder)
            case 5:
                return self.graph(proto.g, visible, keys)
            case 6:
                return tuple(map(float, proto.floats))
            case 7:
                return tuple(map(int, proto.ints))
            case 8:
                return tuple(one.decode("utf-8", "replace") for one in proto.strings)
            case 9:
                return tuple(stored_tensor(one, self._folder) for one in proto.tensors)
            case 11:
                return stored_sparse(proto.sparse_tensor)
            case 13:
                return proto.tp.SerializeToString()
        raise UsageError(f"attribute {proto.name!r} of {node.op_type} {node.name!r} has an unsupported kind")


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
