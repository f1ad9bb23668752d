"""Whether all names of a model are texts: protobuf hands out bytes where a file has something else there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrelay.checkpoint.onnx_in.limits import MAX_DEPTH
from torchrelay.errors import DamagedError, UsageError


def check_readable(model: Any) -> None:
    """Refuse a model with a name that is no text (DamagedError), or graphs nested too deeply (UsageError)."""
    found = [one.domain for one in model.opset_import]
    for function in model.functions:
        found += [function.name, function.domain, *function.input, *function.output]
        found += [name for node in function.node for name in _of_node(node, 0)]
    for name in [*found, *_of_graph(model.graph, 0)]:
        if not isinstance(name, str):
            raise DamagedError(f"the model has a name that is no text, {name[:20]!r}: the file is damaged")


def _of_graph(graph: Any, depth: int) -> Iterable[Any]:
    if depth > MAX_DEPTH:
        raise UsageError(f"the model has graphs more than {MAX_DEPTH} graphs deep: no model needs that")
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
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            yield from _of_graph(graph, depth + 1)


def _of_tensor(tensor: Any) -> Iterable[Any]:
    yield tensor.name
    yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
