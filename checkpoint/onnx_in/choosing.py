"""Which tensors of a file become parameters, which buffers, and which are left out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torchrelay.checkpoint.onnx_in.graph import Content, Graph, Node
from torchrelay.checkpoint.onnx_in.plan import Plan
from torchrelay.errors import UsageError

T = TypeVar("T")

_WITHOUT_GRADIENT = {
    "BatchNormalization": (3, 4),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Pad": (2,),
    "Dropout": (1, 2),
    "Range": (0, 1, 2),
    "OneHot": (0, 1),
    "NonMaxSuppression": (0, 1, 2, 3, 4),
    "Shape": (0,),
    "Size": (0,),
    "ArgMax": (0,),
    "ArgMin": (0,),
    "CastLike": (1,),
    "NonZero": (0,),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
}
"""Inputs that training does not change by gradient: running statistics, sizes, scales of quantization."""
_MADE_UP = re.compile(
    r"val_\d+|scalar_tensor_default(_\d+)?|_val_\d+|onnx::\w+_\d+|.*/Constant(_\d+)?_output_\d+"
)
"""Names that exporters of torch give to constants that they found in the code."""


def kept_initializers(content: Content, plan: Plan) -> list[str]:
    """State dict keys: all where the whole model was asked for, else what the plan needs."""
    whole = plan.results == content.graph.outputs
    inner = {key for node, _ in plan.steps for key in _inner_keys(node)}
    needed = inner | {key for name, key in content.graph.initializers.items() if name in plan.needed}
    return [key for key in content.initializers if whole or key in needed]


def _inner_keys(node: Node) -> Iterable[str]:
    for one in node.attributes.values():
        if isinstance(one, Graph):
            yield from one.initializers.values()
            for inside in one.nodes:
                yield from _inner_keys(inside)


def trained_initializers(content: Content, kept: Sequence[str], trainable: Sequence[str]) -> frozenset[str]:
    """The keys that become parameters: floats that something uses where a gradient reaches them."""
    floats = {key: key for key in kept if content.initializers[key].dtype.is_floating_point}
    found = {key for key in floats if _gradient_reaches(content, key) and not _is_constant(content, key)}
    return frozenset(found | set(matching(floats, trainable)))


def _gradient_reaches(content: Content, key: str) -> bool:
    uses = content.uses.get(key, frozenset())
    if content.initializers[key].itemsize == 1 or not uses:
        return False  # float8 has no arithmetic to be trained in
    return any(at not in _WITHOUT_GRADIENT.get(operator, ()) for operator, at in uses)


def _is_constant(content: Content, key: str) -> bool:
    return content.initializers[key].numel() == 1 and _MADE_UP.fullmatch(key) is not None


def as_patterns(patterns: Sequence[str]) -> Sequence[str]:
    """The patterns themselves; UsageError for one text, whose signs would be taken for patterns."""
    if isinstance(patterns, str):
        raise UsageError(f"patterns are a tuple, as ({patterns!r},), not one text")
    return patterns


def matching(named: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    """What is named by patterns with * and ?; UsageError for a pattern that names nothing."""
    found: dict[str, T] = {}
    for pattern in as_patterns(patterns):
        hits = {name: one for name, one in named.items() if fnmatchcase(name, pattern)}
        if not hits:
            raise UsageError(
                f"pattern {pattern!r} matches no parameter; there are {', '.join(list(named)[:8])}"
            )
        found.update(hits)
    return list(found.values())


def begins_in_training(content: Content) -> bool:
    """Whether the file was made for training: a batch normalization or a dropout that says so."""
    return any(
        (node.operator == "BatchNormalization" and node.attributes.get("training_mode") == 1)
        or (node.operator == "Dropout" and len(node.inputs) > 2 and _is_true(content, node.inputs[2]))
        for node in content.graph.nodes
    )


def _is_true(content: Content, name: str) -> bool:
    graph = content.graph
    if name in graph.initializers:
        return bool(content.initializers[graph.initializers[name]].any())
    return name in graph.constants and bool(content.constants[graph.constants[name]].any())
