"""ModelProto to Content: everything is looked at before anything is made a module of.

One pass over all graphs, inner ones included; unsupported operators, missing values and circles are told
with names, the unsupported ones all at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.onnx_in.element_types import DTYPES, FLOAT4, NARROW_BITS, NARROW_INTS, STRING
from torchrelay.checkpoint.onnx_in.graph import Content, Graph, Node
from torchrelay.checkpoint.onnx_in.limits import MAX_DEPTH, check_made
from torchrelay.checkpoint.onnx_in.model_file import KNOWN_DOMAINS, opsets
from torchrelay.checkpoint.onnx_in.ordering import in_order
from torchrelay.checkpoint.onnx_in.stored_tensors import is_texts, stored_sparse, stored_tensor, stored_texts
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, Size, TensorSpec


def content_of(model: Any, folder: Path | None, supported: Callable[[str, str], bool]) -> Content:
    """What a ModelProto says, in no more memory than the file has bytes; UsageError, DamagedError."""
    versions = opsets(model)
    _check_supported(model.graph, versions, supported)
    return _Builder(versions, folder).content(model.graph)


def _domain(proto: Any) -> str:
    return "" if proto.domain == "ai.onnx" else proto.domain


def _all_nodes(graph: Any, depth: int = 0) -> Iterable[Any]:
    if depth > MAX_DEPTH:
        raise UsageError(f"graph {graph.name!r} lies more than {MAX_DEPTH} graphs deep: no model needs that")
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from _all_nodes(inner, depth + 1)


def _check_supported(graph: Any, versions: dict[str, int], supported: Callable[[str, str], bool]) -> None:
    """Name every operator that cannot be run, with how often it occurs, in one error."""
    missing = Counter((_domain(node), node.op_type) for node in _all_nodes(graph))
    missing = Counter({kind: count for kind, count in missing.items() if not supported(*kind)})
    if missing:
        told = ", ".join(
            f"{domain + '.' if domain else ''}{name} ({count} time{'s' * (count > 1)})"
            for (domain, name), count in sorted(missing.items())
        )
        raise UsageError(
            f"{len(missing)} operator{'s' * (len(missing) > 1)} of this model cannot be imported: {told}. "
            f"Cut the model"
            " before them with outputs=, or export it without them"
        )
    used = {_domain(node) for node in _all_nodes(graph)}
    for domain in used & KNOWN_DOMAINS.keys():
        if domain and versions.get(domain, 1) > KNOWN_DOMAINS[domain]:
            raise UsageError(
                f"the file uses version {versions[domain]} of {domain}, and {KNOWN_DOMAINS[domain]} is the "
                f"newest known"
            )


class _Builder:
    def __init__(self, versions: dict[str, int], folder: Path | None) -> None:
        self._versions, self._folder = versions, folder
        self._initializers: dict[str, torch.Tensor] = {}
        self._constants: list[torch.Tensor] = []
        self._uses: dict[str, set[tuple[str, int]]] = {}
        self._narrow: dict[str, int] = {}
        self._dense = 0

    def content(self, proto: Any) -> Content:
        graph = self.graph(proto, frozenset(), {})
        uses = {key: frozenset(found) for key, found in self._uses.items()}
        return Content(graph, self._initializers, tuple(self._constants), _signature(proto, graph), uses)

    def graph(self, proto: Any, outer: frozenset[str], outer_keys: dict[str, str]) -> Graph:
        """A graph and those inside of it; `outer` are the names that the graphs around it have."""
        initializers = {one.name: self._store(proto, one.name, one) for one in proto.initializer}
        for one in proto.sparse_initializer:
            initializers[one.values.name] = self._store(proto, one.values.name, one)
        self._note_narrow(proto)
        inputs = tuple(one.name for one in proto.input if one.name not in initializers)
        _check_unique(proto.name, [*inputs, *initializers])
        stored = frozenset([*inputs, *initializers])
        ordered, captured = in_order(proto, stored, outer)
        visible = outer | stored | {name for node in ordered for name in node.output if name}
        keys = {**outer_keys, **initializers}
        constants: dict[str, int] = {}
        nodes = []
        for one in ordered:
            if one.op_type == "Constant" and _domain(one) == "" and self._constant(one, constants):
                continue
            nodes.append(self._node(one, visible, keys))
        outputs = tuple(one.name for one in proto.output)
        for inner in (
            value for node in nodes for value in node.attributes.values() if isinstance(value, Graph)
        ):
            captured |= set(inner.captured) - (visible - outer)
        captured |= set(outputs) & outer - (visible - outer)
        return Graph(
            proto.name, inputs, outputs, tuple(nodes), initializers, constants, tuple(sorted(captured))
        )

    def _note_narrow(self, proto: Any) -> None:
        declared = {one.name: one.type.tensor_type.elem_type for one in [*proto.input, *proto.value_info]}
        declared.update((one.name, one.data_type) for one in proto.initializer)
        self._narrow.update((name, number) for name, number in declared.items() if number in NARROW_BITS)

    def _store(self, graph: Any, name: str, proto: Any) -> str:
        if not name:
            raise UsageError(f"graph {graph.name!r} has an initializer without a name")
        key = name
        while key in self._initializers:
            key = f"{graph.name}/{key}"
            if len(key) > 4096:
                raise UsageError(f"initializer {name!r} occurs again and again")
        if not hasattr(proto, "values") and is_texts(proto):
            raise UsageError(f"initializer {name!r} has texts, for which torch has no tensors")
        sparse = hasattr(proto, "values")
        if sparse:
            self._dense += max(0, math.prod(proto.dims))
            check_made("the sparse initializers together", [self._dense])
        self._initializers[key] = stored_sparse(proto) if sparse else stored_tensor(proto, self._folder)
        return key

    def _constant(self, proto: Any, constants: dict[str, int]) -> bool:
        """Take the tensor of a Constant; False where it is texts."""
        made = self._attributes(proto, frozenset(), {})
        value = next(iter(made.values()), None)
        if (
            "value_string" in made
            or "value_strings" in made
            or value is None
            or (isinstance(value, tuple) and (value and isinstance(value[0], str)))
        ):
            return False
        if not isinstance(value, torch.Tensor):
            name = next(iter(made))
            value = torch.tensor(value, dtype=torch.int64 if name.startswith("value_int") else torch.float32)
        constants[proto.output[0]] = len(self._constants)
        self._constants.append(value)
        return True

    def _node(self, proto: Any, visible: frozenset[str], keys: dict[str, str]) -> Node:
        domain = _domain(proto)
        for at, name in enumerate(proto.input):
            if name in keys:
                self._uses.setdefault(keys[name], set()).add((proto.op_type, at))
        return Node(
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
                return stored_texts(proto.t) if is_texts(proto.t) else stored_tensor(proto.t, self._folder)
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
        raise UsageError(
            f"attribute {proto.name!r} of {node.op_type} {node.name!r} has no kind that can be imported"
        )


def _check_unique(graph: str, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"graph {graph!r} has {twice[0]!r} twice among its inputs and initializers")


def _signature(proto: Any, graph: Graph) -> Signature:
    declared = {one.name: one for one in [*proto.input, *proto.output]}
    sides = (tuple(_spec(declared[name]) for name in names) for names in (graph.inputs, graph.outputs))
    return Signature(*sides)


def _spec(proto: Any) -> TensorSpec:
    kind = proto.type.tensor_type
    shape: list[Size] = []
    for at, one in enumerate(kind.shape.dim):
        fixed = one.HasField("dim_value") and one.dim_value >= 0
        shape.append(one.dim_value if fixed else one.dim_param or f"{proto.name}_{at}")
    return TensorSpec(proto.name, tuple(shape), _dtype_name(kind.elem_type))


def _dtype_name(number: int) -> str:
    if number in DTYPES:
        return str(DTYPES[number]).removeprefix("torch.")
    narrow = {21: "uint4", 22: "int4", 25: "uint2", 26: "int2", FLOAT4: "float4_e2m1", STRING: "string"}
    return narrow.get(number, "unknown") if number in (*NARROW_INTS, FLOAT4, STRING) else "unknown"
