"""What has to run for the values that are wanted, and the run: each value forgotten after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from functools import cache
from itertools import count
from typing import Any

import torch

from torchrelay.errors import RelayError, UsageError
from torchrelay.models.onnx.importer.graph import Graph, GraphNode
from torchrelay.models.onnx.importer.operator import Ints, OpCall, Operator, as_ints, as_numbers, on_ints
from torchrelay.models.onnx.importer.tensors import check_entered
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """`steps` are operators, each with the values that nobody needs after it; `results` the values wanted.

    `needed` are the names of the graph's stored values and inputs that take part.
    """

    steps: tuple[tuple[GraphNode, tuple[str, ...]], ...]
    results: tuple[str, ...]
    needed: frozenset[str]


def plan_of(
    graph: Graph, outputs: Sequence[str] | None = None, aux: Sequence[str] = (), drop_last: int = 0
) -> ExecutionPlan:
    """The plan for `outputs` and then `aux`; by default the graph's own, as far as `drop_last` leaves them.

    Raises UsageError for a name that no value of the graph has, and where fewer operators are there than
    dropped.
    """
    if drop_last and outputs is not None:
        raise UsageError("outputs= and drop_last= both say where the model ends: give one of them")
    wanted = [*(ends_without(graph, drop_last) if outputs is None else outputs), *aux]
    known = {name for node in graph.nodes for name in node.outputs if name}
    known |= {*graph.inputs, *graph.initializers, *graph.constants, *graph.captured}
    for name in wanted:
        if name not in known:
            near = ", ".join(map(repr, get_close_matches(name, known, 3)))
            hint = f"near it: {near}" if near else "values() of the model lists them"
            raise UsageError(f"the model has no value {name!r}; {hint}")
    needed, later, steps = set(wanted), set(wanted), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) - {""}:
            needed |= inputs_of(node)
            touched = inputs_of(node) | {name for name in node.outputs if name}
            steps.append((node, tuple(touched - later)))
            later |= touched
    taken = {name for node, _ in steps for name in inputs_of(node)} | set(wanted)
    return ExecutionPlan(tuple(steps[::-1]), tuple(wanted), frozenset(taken))


def inputs_of(node: GraphNode) -> set[str]:
    """The values that a node takes, also for the graphs inside of it."""
    inner = {name for one in node.attributes.values() if isinstance(one, Graph) for name in one.captured}
    return {name for name in node.inputs if name} | inner


def ends_without(graph: Graph, drop_last: int) -> tuple[str, ...]:
    """What the graph gives without its last `drop_last` operators.

    Those of its outputs that are still made, then the values that only dropped operators took and that
    depend on what an input holds: neither weights that were merely transposed nor sizes count.
    """
    if drop_last < 0 or drop_last >= len(graph.nodes) + (drop_last == 0):
        most = max(len(graph.nodes) - 1, 0)
        raise UsageError(
            f"drop_last is {drop_last}, and the model has {len(graph.nodes)} operators: give 0 to {most}"
        )
    if drop_last == 0:
        return graph.outputs
    kept, dropped = graph.nodes[:-drop_last], graph.nodes[-drop_last:]
    made = [name for node in kept for name in node.outputs if name]
    living = set(graph.inputs)  # values that depend on what the inputs hold, not only on their sizes
    for node in kept:
        if node.operator not in ("Shape", "Size") and inputs_of(node) & living:
            living |= {name for name in node.outputs if name}
    taken = {name for node in kept if living & set(node.outputs) for name in inputs_of(node)}
    wanted = {name for node in dropped for name in inputs_of(node)}
    left = [name for name in graph.outputs if name in {*made, *graph.inputs}]
    loose = [name for name in made if name in wanted - taken and name in living and name not in left]
    if not (left or loose):
        raise UsageError(f"without its last {drop_last} operators the model gives nothing")
    return (*left, *loose)


PREVIEW, TRAINING, ML = "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.ml"


@cache
def operators() -> Mapping[tuple[str, str], Operator]:
    """(domain, name) -> what runs it."""
    # Imported when the first model is read, because together they are not small.
    from torchrelay.models.onnx.importer.ops import (
        attention,
        cast,
        control_flow,
        conv,
        elementwise,
        indexing,
        norm,
        recurrent,
        reduce,
        resize,
        shape,
    )

    families = (
        attention, cast, control_flow, conv, elementwise, indexing, norm, recurrent, reduce, resize, shape,
    )  # fmt: skip
    tables: list[tuple[str, Mapping[str, Any]]] = [("", family.OPERATORS) for family in families]
    tables += [(PREVIEW, attention.PREVIEW_OPERATORS), (TRAINING, norm.TRAINING_OPERATORS)]
    return {
        (domain, name): run if isinstance(run, Operator) else Operator(run)
        for domain, table in [*tables, (ML, norm.ML_OPERATORS)]
        for name, run in table.items()
    }


def supported(domain: str, name: str) -> bool:
    """Whether this operator can be imported."""
    return (domain, name) in operators() or (domain, name) == ("", "Constant")


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What a run needs of the module: its mode, and its stored values."""

    training: bool
    device: torch.device
    stored: Callable[[Graph, str], Any]
    """The tensor that the module has for a name of a graph."""
    known: Callable[[Graph, str], Ints | None]
    """The same as integers, where it is a small integer constant."""
    plans: dict[int, ExecutionPlan]
    """Plans of inner graphs, by their identity."""
    entered: Iterator[int] = field(default_factory=lambda: count(1))
    """How often inner graphs have been run."""


def run_plan(
    graph: Graph, plan: ExecutionPlan, given: Mapping[str, Any], around: Surroundings
) -> tuple[Any, ...]:
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
    graph: Graph, node: GraphNode, values: dict[str, Any], known: Mapping[str, Ints], around: Surroundings
) -> None:
    inputs = [values[name] if name else None for name in node.inputs]
    made: Any = None
    if not node.domain and any(isinstance(one, Ints) for one in inputs):  # arithmetic on sizes
        given = [known.get(name, one) for name, one in zip(node.inputs, inputs, strict=True)]
        made = on_ints(node.operator, dict(node.attributes), given)
    if made is None:
        made = _on_tensors(graph, node, inputs, values, known, around)
    results = made if isinstance(made, tuple) else (made,)
    for name, value in zip(node.outputs, results, strict=False):
        if name:
            values[name] = value


def _on_tensors(
    graph: Graph,
    node: GraphNode,
    inputs: list[Any],
    values: Mapping[str, Any],
    known: Mapping[str, Ints],
    around: Surroundings,
) -> Any:
    operator = operators()[node.kind]
    own = frozenset(at for at, name in enumerate(node.inputs) if name in graph.initializers)
    fixed = own | {at for at, name in enumerate(node.inputs) if name in graph.constants}
    device = _device(inputs, around)
    call = OpCall(node, around.training, device, own, fixed, _entering(values, known, around))

    def wanted(at: int, name: str, value: Any) -> Any:
        """An input in the form in which the operator wants it."""
        if at in operator.ints:
            return as_ints(known.get(name, value))
        if at not in operator.numbers:
            return call.tensor(value)
        return as_numbers((around.known(graph, name) if at in fixed else None) or value)

    if not operator.raw:
        inputs = [wanted(*one) for one in zip(count(), node.inputs, inputs)]
    try:
        return operator.run(call, *inputs)
    except RelayError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        if type(error).__module__.startswith("torch."):
            raise  # what tracing raises is meant for whoever traces
        raise UsageError(f"{node} failed on {_told(inputs)}: {error}") from error


def _device(inputs: list[Any], around: Surroundings) -> torch.device:
    return next((one.device for one in inputs if isinstance(one, torch.Tensor)), around.device)


def _told(inputs: list[Any]) -> str:
    shapes = (
        f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else str(one)[:60]
        for one in inputs
    )
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
