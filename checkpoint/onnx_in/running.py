"""Runs a plan: values by name, each forgotten when nobody needs it any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from itertools import count
from typing import Any

import torch

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.graph import Graph, Node
from torchrelay.checkpoint.onnx_in.host_ints import Ints, as_ints, as_numbers, on_ints
from torchrelay.checkpoint.onnx_in.limits import check_entered
from torchrelay.checkpoint.onnx_in.operators import operators
from torchrelay.checkpoint.onnx_in.ops.operator import Operator
from torchrelay.checkpoint.onnx_in.plan import Plan, plan_of
from torchrelay.errors import RelayError, UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What a run needs of the module: its mode, and its stored values."""

    training: bool
    device: torch.device
    stored: Callable[[Graph, str], Any]
    """The tensor that the module has for a name of a graph."""
    known: Callable[[Graph, str], Ints | None]
    """The same as integers, where it is a small integer constant."""
    plans: dict[int, Plan]
    """Plans of inner graphs, by their identity."""
    entered: Iterator[int] = field(default_factory=lambda: count(1))
    """How often inner graphs have been run."""


def run_plan(graph: Graph, plan: Plan, given: Mapping[str, Any], around: Surroundings) -> tuple[Any, ...]:
    """The results of a plan; `given` are the inputs, and what inner graphs take from around them."""
    values = dict(given)
    known: dict[str, Ints] = {}
    for name in plan.needed:
        if name in graph.initializers or name in graph.constants:
            values[name] = around.stored(graph, name)
            ints = None if values[name].is_floating_point() else around.known(graph, name)
            if ints is not None:
                known[name] = ints
    for node, done in plan.steps:
        _run_node(graph, node, values, known, around)
        for name in done:
            values.pop(name, None)
    return tuple(values[name] for name in plan.results)


def _run_node(
    graph: Graph, node: Node, values: dict[str, Any], known: Mapping[str, Ints], around: Surroundings
) -> None:
    inputs = [values[name] if name else None for name in node.inputs]
    made = _on_host(node, inputs, known)
    if made is None:
        made = _on_tensors(graph, node, inputs, values, known, around)
    results = made if isinstance(made, tuple) else (made,)
    for name, value in zip(node.outputs, results, strict=False):
        if name:
            values[name] = value


def _on_host(node: Node, inputs: list[Any], known: Mapping[str, Ints]) -> Ints | None:
    """The result of arithmetic on sizes; None where tensors take part."""
    if node.domain or not any(isinstance(one, Ints) for one in inputs):
        return None
    given = [known.get(name, one) for name, one in zip(node.inputs, inputs, strict=True)]
    return on_ints(node.operator, dict(node.attributes), given)


def _on_tensors(
    graph: Graph,
    node: Node,
    inputs: list[Any],
    values: Mapping[str, Any],
    known: Mapping[str, Ints],
    around: Surroundings,
) -> Any:
    operator = operators()[node.kind]
    own = frozenset(at for at, name in enumerate(node.inputs) if name in graph.initializers)
    fixed = own | {at for at, name in enumerate(node.inputs) if name in graph.constants}
    call = Call(node, around.training, _device(inputs, around), own, fixed, _entering(values, known, around))
    if not operator.raw:
        inputs = [
            _input(
                graph,
                operator,
                at,
                name,
                known.get(name, value) if at in operator.ints else value,
                call,
                around,
            )
            for at, (name, value) in enumerate(zip(node.inputs, inputs, strict=True))
        ]
    try:
        return operator.run(call, *inputs)
    except RelayError:
        raise
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
        OverflowError,
        ZeroDivisionError,
        KeyError,
    ) as error:
        if type(error).__module__.startswith("torch."):
            raise  # what tracing raises is meant for whoever traces
        raise UsageError(f"{node} failed on {_told(inputs)}: {error}") from error


def _input(
    graph: Graph, operator: Operator, at: int, name: str, value: Any, call: Call, around: Surroundings
) -> Any:
    """An input in the form in which the operator wants it."""
    if at in operator.ints:
        return as_ints(value)
    if at not in operator.numbers:
        return call.tensor(value)
    stored = name in graph.initializers or name in graph.constants
    return as_numbers((around.known(graph, name) if stored else None) or value)


def _device(inputs: list[Any], around: Surroundings) -> torch.device:
    return next((one.device for one in inputs if isinstance(one, torch.Tensor)), around.device)


def _told(inputs: list[Any]) -> str:
    shapes = [
        f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else str(one)[:60]
        for one in inputs
    ]
    return ", ".join(shapes) or "no inputs"


def _entering(
    values: Mapping[str, Any], known: Mapping[str, Ints], around: Surroundings
) -> Callable[[Graph, Mapping[str, Any]], tuple[Any, ...]]:
    def enter(inner: Graph, given: Mapping[str, Any]) -> tuple[Any, ...]:
        check_entered(f"graph {inner.name!r}", next(around.entered))
        if id(inner) not in around.plans:
            around.plans[id(inner)] = plan_of(inner)
        outer = {name: known.get(name, values[name]) for name in inner.captured}
        return run_plan(inner, around.plans[id(inner)], {**outer, **given}, around)

    return enter
