"""The order in which the operators of a graph can run, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrelay.checkpoint.onnx_in.limits import MAX_DEPTH
from torchrelay.errors import UsageError


def in_order(graph: Any, stored: frozenset[str], outer: frozenset[str]) -> tuple[list[Any], set[str]]:
    """The nodes of a GraphProto, each after what it needs; and what it takes from `outer`.

    `stored` are its inputs and initializers. Raises UsageError for a value that nobody makes, one that is
    made twice, and for circles.
    """
    makers = _makers(graph, stored)
    needs = [_needed(node) for node in graph.node]
    missing = sorted({name for need in needs for name in need} - makers.keys() - stored - outer)
    unmade = [one.name for one in graph.output if one.name not in makers.keys() | stored | outer]
    if missing or unmade:
        told = ", ".join(map(repr, [*missing, *unmade][:20]))
        raise UsageError(f"graph {graph.name!r} needs values that nothing makes: {told}")
    captured = {name for need in needs for name in need} & outer - makers.keys() - stored
    return [graph.node[at] for at in _sorted(graph, makers, needs)], captured


def _makers(graph: Any, stored: frozenset[str]) -> dict[str, int]:
    makers: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in makers or name in stored:
                raise UsageError(f"graph {graph.name!r} makes the value {name!r} twice")
            makers[name] = at
    return makers


def _needed(node: Any, depth: int = 0) -> set[str]:
    """The names that a node takes, those that graphs inside of it take from around them included."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{node.op_type} {node.name!r} has graphs more than {MAX_DEPTH} deep")
    found = set(filter(None, node.input))
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            found |= _needed_inside(graph, depth + 1)
    return found


def _needed_inside(graph: Any, depth: int) -> set[str]:
    own = {one.name for side in (graph.input, graph.initializer) for one in side}
    own |= {one.values.name for one in graph.sparse_initializer}
    own |= {name for node in graph.node for name in node.output}
    wanted: set[str] = {one.name for one in graph.output}
    for node in graph.node:
        wanted |= _needed(node, depth)
    return wanted - own


def _sorted(graph: Any, makers: dict[str, int], needs: list[set[str]]) -> Iterable[int]:
    before = [{makers[name] for name in need if name in makers} for need in needs]
    if all(max(found, default=-1) < at for at, found in enumerate(before)):
        return range(len(needs))  # as the format wants it
    done: list[int] = []
    seen: set[int] = set()
    left = list(range(len(needs)))
    waiting: dict[int, list[int]] = {}
    counts = [len(found) for found in before]
    for at, found in enumerate(before):
        for one in found:
            waiting.setdefault(one, []).append(at)
    ready = [at for at in left if counts[at] == 0]
    while ready:
        at = ready.pop(0)
        done.append(at)
        seen.add(at)
        for after in waiting.get(at, ()):
            counts[after] -= 1
            if counts[after] == 0:
                ready.append(after)
    if len(done) < len(needs):
        node = graph.node[next(at for at in left if at not in seen)]
        raise UsageError(
            f"graph {graph.name!r} has a circle: {len(needs) - len(done)} operators wait for each other, "
            f"among them"
            f" {node.op_type} {node.name!r}, which makes {list(node.output)[:3]}"
        )
    return done
