"""Operators and their calls, plans of the operators needed for the requested values, and their runs.

A value is released after its last use. Sizes from Shape and arithmetic on them are kept as integers, so that
no shapes are read from tensors. Under torch.export they are symbols, and a dynamic batch size stays dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from itertools import count
from typing import Any

import torch

from torchrelay.errors import RelayError, UsageError
from torchrelay.models.onnx.importer import tensors as limits
from torchrelay.models.onnx.importer.graph import Graph, GraphNode
from torchrelay.records import dataclass

MAX_KNOWN = 4096
"""Largest integer constant, in elements, that is also kept as integers."""


@dataclass(frozen=True, eq=False)
class Ints:
    """A vector of 64-bit integers, or with `scalar` a single one."""

    values: tuple[Any, ...]
    scalar: bool = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Convert to a tensor; symbols stay symbols."""
        if all(type(one) is int for one in self.values):
            found = torch.tensor(self.values, dtype=torch.int64, device=device)
        else:
            one_by_one = [torch.full((), one, dtype=torch.int64, device=device) for one in self.values]
            found = torch.stack(one_by_one)
        return found.reshape(()) if self.scalar else found


def known_ints(tensor: torch.Tensor) -> Ints | None:
    """Read a small tensor of at most one dimension as integers; None for others."""
    bytes_ = tensor.dtype in (torch.int8, torch.uint8, torch.bool)
    if bytes_ or tensor.dim() > 1 or tensor.numel() > MAX_KNOWN:
        return None
    return Ints(tuple(tensor.reshape(-1).tolist()), tensor.dim() == 0)


def as_numbers(value: Any) -> list[Any] | None:
    """Convert an input of factors to a flat list of floats."""
    if value is None:
        return None
    return list(value.values if isinstance(value, Ints) else value.reshape(-1).tolist())


def as_ints(value: Any) -> list[Any] | None:
    """Convert an input of sizes, axes or indices to a flat list of integers."""
    found = as_numbers(value)
    return found if found is None or isinstance(value, Ints) else [int(one) for one in found]


def _pairwise(compute: Callable[[Any, Any], Any]) -> Callable[..., Ints | None]:
    def run(attributes: Mapping[str, Any], one: Ints, other: Ints) -> Ints | None:
        size = max(len(one.values), len(other.values))
        if not {len(one.values), len(other.values)} <= {1, size}:
            return None
        ones, others = (side.values * (size if len(side.values) == 1 else 1) for side in (one, other))
        return Ints(tuple(map(compute, ones, others)), one.scalar and other.scalar)

    return run


def _divided(one: Any, other: Any) -> Any:
    if type(one) is int and type(other) is int:
        return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    return one // other


def _gather(attributes: Mapping[str, Any], data: Ints, places: Ints) -> Ints | None:
    known, size = data.values, len(data.values)
    inside = all(type(place) is int and -size <= place < size for place in places.values)
    return Ints(tuple(known[place] for place in places.values), places.scalar) if inside else None


def _slice(attributes: Mapping[str, Any], data: Ints, *where: Ints) -> Ints | None:
    if "starts" in attributes or any(type(one) is not int for part in where for one in part.values):
        return None
    if any(len(part.values) != 1 for part in where) or {*(one.values for one in where[2:3])} - {(0,), (-1,)}:
        return None
    step = where[3].values[0] if len(where) > 3 else 1
    begin, end = where[0].values[0], where[1].values[0]
    if step < 0 and end < -len(data.values):
        end = None
    return Ints(data.values[begin:end:step])


def _reshape(attributes: Mapping[str, Any], data: Ints, shape: Ints) -> Ints | None:
    if len(shape.values) == 1 and shape.values[0] in (-1, len(data.values)):
        return Ints(data.values)
    return Ints(data.values, scalar=True) if not shape.values and len(data.values) == 1 else None


_ON_INTS: dict[str, Callable[..., Ints | None]] = {
    "Add": _pairwise(lambda one, other: one + other),
    "Sub": _pairwise(lambda one, other: one - other),
    "Mul": _pairwise(lambda one, other: one * other),
    "Div": _pairwise(_divided),
    "Gather": _gather,
    "Concat": lambda said, *parts: Ints(tuple(one for part in parts for one in part.values)),
    "Slice": _slice,
    "Identity": lambda said, data: data,
    "Cast": lambda said, data: data if said.get("to") == 7 else None,
    "Unsqueeze": lambda said, data, *_: Ints(data.values) if data.scalar else None,
    "Squeeze": lambda said, data, *_: Ints(data.values, scalar=True) if len(data.values) == 1 else None,
    "ReduceProd": lambda said, data, *_: Ints((math.prod(data.values),), scalar=not said.get("keepdims", 1)),
    "Reshape": _reshape,
}


def on_ints(node: GraphNode, inputs: Sequence[Any]) -> Ints | None:
    """Compute an operator on known integers; None if it needs tensors."""
    compute = _ON_INTS.get(node.operator)
    if compute is None or not all(isinstance(one, Ints) for one in inputs):
        return None
    return compute(node.attributes, *inputs)


@dataclass(frozen=True)
class Operator:
    """An operator: `run(call, *inputs)` returns the output or a tuple; omitted inputs are None.

    Inputs at the positions `ints` (sizes, axes, indices) are passed as lists of integers, those at `numbers`
    as lists of floats. With `raw` all inputs are passed unchanged, including known integers.
    """

    run: Callable[..., Any]
    ints: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    raw: bool = False


@dataclass(frozen=True, eq=False)
class OpCall:
    """One run of an operator: its attributes, the mode of the module, and a function to run inner graphs.

    `own` are the positions of inputs that are initializers, `fixed` also those of constants.
    """

    node: GraphNode
    training: bool
    device: torch.device
    own: frozenset[int]
    fixed: frozenset[int]
    enter: Callable[[Graph, Mapping[str, Any]], tuple[Any, ...]]

    @property
    def version(self) -> int:
        """Version of the operator set."""
        return self.node.version

    @property
    def outputs(self) -> int:
        """Number of named outputs."""
        return max((at + 1 for at, name in enumerate(self.node.outputs) if name), default=0)

    def has(self, name: str) -> bool:
        """Return True if the attribute is given."""
        return name in self.node.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or its default in the standard."""
        return self.node.attributes.get(name, default)

    def need(self, name: str) -> Any:
        """Return the attribute; raises UsageError if it is missing."""
        if name not in self.node.attributes:
            raise UsageError(f"{self.node} lacks the attribute {name!r}")
        return self.node.attributes[name]

    def graph(self, name: str) -> Graph:
        """Return the inner graph with this name."""
        found = self.need(name)
        if not isinstance(found, Graph):
            raise UsageError(f"{self.node} has no graph {name!r}")
        return found

    def tensor(self, value: Any) -> Any:
        """Convert a value that may be known integers to a tensor."""
        return value.tensor(self.device) if isinstance(value, Ints) else value

    def fail(self, why: str) -> UsageError:
        """Return the error for an unsupported use of this operator."""
        return UsageError(f"{self.node}: {why}")


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """Operators, each with the values to release after it; `results`; and the stored values `needed`."""

    steps: tuple[tuple[GraphNode, tuple[str, ...]], ...]
    results: tuple[str, ...]
    needed: frozenset[str]


def plan_of(
    graph: Graph, outputs: Sequence[str] | None = None, aux: Sequence[str] = (), drop_last: int = 0
) -> ExecutionPlan:
    """Return the plan for `outputs` (default: the graph's, cut by `drop_last`) and then `aux`; UsageError."""
    if drop_last and outputs is not None:
        raise UsageError("outputs= and drop_last= cannot be combined")
    wanted = [*(ends_without(graph, drop_last) if outputs is None else outputs), *aux]
    known = {name for node in graph.nodes for name in node.outputs if name}
    known |= {*graph.inputs, *graph.initializers, *graph.constants, *graph.captured}
    for name in wanted:
        if name not in known:
            similar = ", ".join(map(repr, get_close_matches(name, known, 3)))
            hint = f"similar names: {similar}" if similar else "values() of the model lists all"
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
    """Return the values that a node uses, including those of its inner graphs."""
    inner = {name for one in node.attributes.values() if isinstance(one, Graph) for name in one.captured}
    return {name for name in node.inputs if name} | inner


def ends_without(graph: Graph, drop_last: int) -> tuple[str, ...]:
    """Return the outputs left, and values of dropped operators that depend on an input's contents."""
    if drop_last < 0 or drop_last >= len(graph.nodes) + (drop_last == 0):
        most = max(len(graph.nodes) - 1, 0)
        raise UsageError(
            f"invalid drop_last={drop_last}: expected 0 to {most}, the model has {len(graph.nodes)} operators"
        )
    if drop_last == 0:
        return graph.outputs
    kept, dropped = graph.nodes[:-drop_last], graph.nodes[-drop_last:]
    made = [name for node in kept for name in node.outputs if name]
    living = set(graph.inputs)  # values that depend on the contents of the inputs, not only on their sizes
    for node in kept:
        if node.operator not in ("Shape", "Size") and inputs_of(node) & living:
            living |= {name for name in node.outputs if name}
    taken = {name for node in kept if living & set(node.outputs) for name in inputs_of(node)}
    wanted = {name for node in dropped for name in inputs_of(node)}
    left = [name for name in graph.outputs if name in {*made, *graph.inputs}]
    loose = [name for name in made if name in wanted - taken and name in living and name not in left]
    if not (left or loose):
        raise UsageError(f"without its last {drop_last} operators the model has no outputs")
    return (*left, *loose)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """State of the module for a run: its operators by domain and name, its mode and stored values."""

    operators: Mapping[tuple[str, str], Operator]
    training: bool
    device: torch.device
    stored: Callable[[Graph, str], Any]
    """Returns the module's tensor for a name of a graph."""
    known: Callable[[Graph, str], Ints | None]
    """Returns the same as integers if it is a small integer constant."""
    plans: dict[int, ExecutionPlan]
    """Plans of inner graphs by id."""
    entered: Iterator[int] = field(default_factory=lambda: count(1))
    """Number of runs of inner graphs."""


def run_plan(
    graph: Graph, plan: ExecutionPlan, given: Mapping[str, Any], around: Surroundings
) -> tuple[Any, ...]:
    """Run a plan; `given` are the inputs, and for inner graphs the captured values."""
    values = dict(given)
    known: dict[str, Ints] = {}
    for name in plan.needed:
        if name in graph.initializers or name in graph.constants:
            values[name] = around.stored(graph, name)
            ints = None if values[name].is_floating_point() else around.known(graph, name)
            if ints is not None:
                known[name] = ints
    for node, done in plan.steps:
        inputs = [values[name] if name else None for name in node.inputs]
        made: Any = None
        if not node.domain and any(isinstance(one, Ints) for one in inputs):  # arithmetic on sizes
            made = on_ints(
                node, [known.get(name, one) for name, one in zip(node.inputs, inputs, strict=True)]
            )
        if made is None:
            made = _on_tensors(graph, node, inputs, values, known, around)
        results = made if isinstance(made, tuple) else (made,)
        values.update((name, one) for name, one in zip(node.outputs, results, strict=False) if name)
        for name in done:
            values.pop(name, None)
    return tuple(values[name] for name in plan.results)


def _on_tensors(
    graph: Graph,
    node: GraphNode,
    inputs: list[Any],
    values: Mapping[str, Any],
    known: Mapping[str, Ints],
    around: Surroundings,
) -> Any:
    operator = around.operators[node.domain, node.operator]
    own = frozenset(at for at, name in enumerate(node.inputs) if name in graph.initializers)
    fixed = own | {at for at, name in enumerate(node.inputs) if name in graph.constants}
    device = next((one.device for one in inputs if isinstance(one, torch.Tensor)), around.device)

    def enter(inner: Graph, given: Mapping[str, Any]) -> tuple[Any, ...]:
        most = limits.MAX_ENTERED
        if next(around.entered) > most:
            raise UsageError(
                f"graph {inner.name!r}: one call exceeded the limit of {most} runs of inner graphs"
            )
        if id(inner) not in around.plans:
            around.plans[id(inner)] = plan_of(inner)
        outer = {name: known.get(name, values[name]) for name in inner.captured}
        return run_plan(inner, around.plans[id(inner)], {**outer, **given}, around)

    call = OpCall(node, around.training, device, own, fixed, enter)
    if not operator.raw:
        for at, (name, value) in enumerate(zip(node.inputs, inputs, strict=True)):
            if at in operator.ints:
                inputs[at] = as_ints(known.get(name, value))
            elif at in operator.numbers:
                inputs[at] = as_numbers((around.known(graph, name) if at in fixed else None) or value)
            else:
                inputs[at] = call.tensor(value)
    try:
        return operator.run(call, *inputs)
    except RelayError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        if type(error).__module__.startswith("torch."):
            raise  # errors of tracing belong to the tracer
        shapes = (
            f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else str(one)[:60]
            for one in inputs
        )
        raise UsageError(f"{node} failed on {(', '.join(shapes) or 'no inputs')}: {error}") from error
