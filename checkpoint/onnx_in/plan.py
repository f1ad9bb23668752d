"""Which operators have to run for the values that are wanted, and when a value is needed no more. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from torchrelay.checkpoint.onnx_in.graph import Graph, Node
from torchrelay.errors import UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class Plan:
    """`steps` are operators, each with the values that nobody needs after it; `results` the values wanted.

    `needed` are the names of the graph's stored values and inputs that take part.
    """

    steps: tuple[tuple[Node, tuple[str, ...]], ...]
    results: tuple[str, ...]
    needed: frozenset[str]


def plan_of(
    graph: Graph, outputs: Sequence[str] | None = None, aux: Sequence[str] = (), drop_last: int = 0
) -> Plan:
    """The plan for `outputs` and then `aux`; by default the graph's own, as far as `drop_last` leaves them.

    Raises UsageError for a name that no value of the graph has, and where fewer operators are there than
    dropped.
    """
    if drop_last and outputs is not None:
        raise UsageError("outputs= and drop_last= both say where the model ends: give one of them")
    wanted = [*(ends_without(graph, drop_last) if outputs is None else outputs), *aux]
    known = _values(graph)
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = (
                f"; near it: {', '.join(map(repr, near))}" if near else "; values() of the model lists them"
            )
            raise UsageError(f"the model has no value {name!r}{hint}")
    nodes = _needed_nodes(graph, wanted)
    needed = {name for node in nodes for name in inputs_of(node)} | set(wanted)
    return Plan(tuple(_with_ends(nodes, frozenset(wanted))), tuple(wanted), frozenset(needed))


def inputs_of(node: Node) -> set[str]:
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
    living = _depending(graph, kept)
    taken = {name for node in kept if living & set(node.outputs) for name in inputs_of(node)}
    wanted = {name for node in dropped for name in inputs_of(node)}
    left = [name for name in graph.outputs if name in {*made, *graph.inputs}]
    loose = [name for name in made if name in wanted - taken and name in living and name not in left]
    if not (left or loose):
        raise UsageError(f"without its last {drop_last} operators the model gives nothing")
    return (*left, *loose)


def _depending(graph: Graph, nodes: Sequence[Node]) -> set[str]:
    """Values that depend on what the inputs hold, not only on their sizes."""
    found = set(graph.inputs)
    for node in nodes:
        if node.operator not in ("Shape", "Size") and inputs_of(node) & found:
            found |= {name for name in node.outputs if name}
    return found


def _values(graph: Graph) -> set[str]:
    made = {name for node in graph.nodes for name in node.outputs if name}
    return made | {*graph.inputs, *graph.initializers, *graph.constants, *graph.captured}


def _needed_nodes(graph: Graph, wanted: Sequence[str]) -> list[Node]:
    needed, found = set(wanted), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) - {""}:
            found.append(node)
            needed |= inputs_of(node)
    return found[::-1]


def _with_ends(nodes: Sequence[Node], wanted: frozenset[str]) -> list[tuple[Node, tuple[str, ...]]]:
    steps, later = [], set(wanted)
    for node in reversed(nodes):
        touched = inputs_of(node) | {name for name in node.outputs if name}
        steps.append((node, tuple(touched - later)))
        later |= touched
    return steps[::-1]
