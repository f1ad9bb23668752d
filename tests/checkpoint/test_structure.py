"""What is remembered of earlier saves is never believed: cached plans are those of fresh ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest.schema import VALUE_LIMIT_BYTES
from torchrelay.checkpoint.format.names import Recent
from torchrelay.checkpoint.save.agreement import Described, SpecExchange, class_json
from torchrelay.checkpoint.save.assignments import NodeClass, PlannedLeaf
from torchrelay.checkpoint.save.capture import NodeHistory, NodeState
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role, Value, spec_of
from torchrelay.errors import SaveFailedError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Solo

NODES = 3
HOSTS = (0, 0, 1)
NAMES = [f"trainer_{rank}" for rank in range(NODES)]
Node = dict[str, tuple[Leaf, str]]
"""Leaf name to leaf and scope."""


def tensor(name: str, count: int = 300, dtype: torch.dtype = torch.float32) -> Leaf:
    return Leaf(name, "model", Role.PARAMETER, "main", torch.zeros(count, dtype=dtype))


def first_node() -> Node:
    leaves = [tensor(f"model.{i}", 100 * i) for i in range(4)]
    leaves += [Leaf("note", "note", Role.VALUE, "main", Value("short"))]
    return {leaf.name: (leaf, "replicated") for leaf in leaves}


def content(leaf: Leaf, make: Callable[[torch.Tensor], torch.Tensor]) -> Leaf:
    return leaf if isinstance(leaf.content, Value) else replace(leaf, content=make(leaf.content))


CHANGES: dict[str, Callable[[Leaf, str], tuple[Leaf, str]]] = {
    "none": lambda leaf, scope: (leaf, scope),
    "other memory": lambda leaf, scope: (content(leaf, torch.clone), scope),
    "longer": lambda leaf, scope: (content(leaf, lambda one: torch.zeros(one.numel() + 1)), scope),
    "shape": lambda leaf, scope: (content(leaf, lambda one: one.reshape(1, -1)), scope),
    "type": lambda leaf, scope: (content(leaf, lambda one: one.to(torch.float64)), scope),
    "same size, other type": lambda leaf, scope: (content(leaf, lambda one: one.to(torch.int32)), scope),
    "role": lambda leaf, scope: (replace(leaf, role=Role.BUFFER), scope),
    "group": lambda leaf, scope: (replace(leaf, group="optim"), scope),
    "blob": lambda leaf, scope: (replace(leaf, blob="other"), scope),
    "tied": lambda leaf, scope: (replace(leaf, alias_of="model.0"), scope),
    "value": lambda leaf, scope: (replace(leaf, content=Value("now a value")), scope),
    "number": lambda leaf, scope: (replace(leaf, content=Value(17)), scope),
    "no value": lambda leaf, scope: (replace(leaf, content=Value(None)), scope),
    "large value": lambda leaf, scope: (replace(leaf, content=Value("x" * 70_000)), scope),
    "of each rank": lambda leaf, scope: (leaf, "rank"),
    "of each host": lambda leaf, scope: (leaf, "host"),
    "replicated": lambda leaf, scope: (leaf, "replicated"),
}


def changed(node: Node, change: tuple[str, str]) -> Node:
    """The node after one change of one leaf; `add`, `remove` and `last` concern the list."""
    what, name = change
    if what == "add" or name not in node:
        return {**node, name: (tensor(name), "replicated")}
    rest = {key: value for key, value in node.items() if key != name}
    if what == "remove":
        return rest
    if what == "last":
        return {**rest, name: node[name]}
    return {**node, name: CHANGES[what](*node[name])}


def state_of(rank: int, node: Node, histories: dict[str, NodeHistory]) -> NodeState:
    leaves = [leaf for leaf, _ in node.values()]
    scopes = {name: scope for name, (_, scope) in node.items()}
    specs, scopes = histories[NAMES[rank]].structure(leaves, scopes)
    place = NodePlace(NAMES[rank], rank, NODES, f"host{HOSTS[rank]}", HOSTS[rank])
    return NodeState(place, {leaf.name: leaf for leaf in leaves}, specs, scopes, {})


def unsized(found: Any) -> Any:
    """The same without the sizes of small values, which decide nothing."""
    if isinstance(found, tuple):
        return tuple(map(unsized, found))
    if isinstance(found, LeafSpec):
        small = found.kind == "value" and found.nbytes <= VALUE_LIMIT_BYTES
        return replace(found, nbytes=0) if small else found
    if isinstance(found, NodeClass):
        return replace(found, leaves=unsized(found.leaves))
    return found._replace(leaf=unsized(found.leaf)) if isinstance(found, PlannedLeaf) else found


def planned(nodes: list[Node], histories: dict[str, NodeHistory], exchange: SpecExchange) -> Any:
    """The whole answer, or the error."""
    states = [state_of(rank, node, histories) for rank, node in enumerate(nodes)]
    try:
        classes, scopes = exchange.classes(Solo(), states, NAMES)
    except SaveFailedError as error:
        return str(error)
    plan = exchange.plan(classes, scopes, HOSTS)
    assert plan == plan_classes(classes, scopes=scopes, hosts=HOSTS)
    return classes, scopes, plan.hash, plan.rows, plan.layouts


steps = st.tuples(
    st.sampled_from([*CHANGES, "add", "remove", "last"]),
    st.sampled_from(["model.0", "model.1", "model.2", "model.3", "model.new", "note"]),
    st.sampled_from([(0,), (2,), (0, 1, 2), (0, 1, 2), (1, 2)]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, min_size=1, max_size=8))
def test_cached_and_fresh_plans_are_equal(sequence: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Whatever changes, on one node or on all: specs, classes, scopes and plans are as if new."""
    nodes = [first_node() for _ in range(NODES)]
    histories, exchange = defaultdict(NodeHistory), SpecExchange()
    planned(nodes, histories, exchange)
    for what, name, where in sequence:
        nodes = [
            changed(node, (what, name)) if rank in where else dict(node) for rank, node in enumerate(nodes)
        ]
        for rank, node in enumerate(nodes):
            specs = state_of(rank, node, histories).specs
            assert unsized(specs) == unsized(tuple(spec_of(leaf) for leaf, _ in node.values()))
        assert unsized(planned(nodes, histories, exchange)) == unsized(
            planned(nodes, defaultdict(NodeHistory), SpecExchange())
        )


def test_an_unchanged_structure_is_recognised() -> None:
    """Other tensors of the same form give the very same plan; another form never does."""
    histories, exchange = defaultdict(NodeHistory), SpecExchange()
    nodes = [first_node() for _ in range(NODES)]

    def plan() -> Any:
        states = [state_of(rank, node, histories) for rank, node in enumerate(nodes)]
        return exchange.plan(*exchange.classes(Solo(), states, NAMES), HOSTS)

    first = plan()
    nodes = [changed(node, ("other memory", "model.2")) for node in nodes]
    assert plan() is first
    nodes = [changed(node, ("longer", "model.2")) for node in nodes]
    assert plan() is not first and plan().hash != first.hash


def test_a_value_that_grows_keeps_its_plan_until_it_is_too_long_for_a_manifest() -> None:
    """A counter from 9 to 10 is no new plan; a value that must lie in a shard from now on is one."""
    histories, exchange = defaultdict(NodeHistory), SpecExchange()

    def plan(value: str) -> Any:
        node = first_node()
        node["note"] = replace(node["note"][0], content=Value(value)), "replicated"
        states = [state_of(rank, node, histories) for rank in range(NODES)]
        return exchange.plan(*exchange.classes(Solo(), states, NAMES), HOSTS)

    first = plan("9")
    assert plan("10") is first
    large = plan("x" * VALUE_LIMIT_BYTES)
    assert large is not first and large.hash != first.hash
    assert plan("10").hash == first.hash


def test_a_manifest_tells_how_long_values_are_now(tmp_path: Path) -> None:
    """Saves of the same plan: every manifest has the sizes of its own values, shared and of one rank."""
    grown = ["9", "10", "a much longer text"]
    job = Job("values", blobs={"shared": ""})
    job.blobs({"mine": ""}, scope="rank")

    @job.epoch
    def work(ctx: Any) -> None:
        ctx["shared"] = ctx["mine"] = grown[ctx.epoch - 1]

    job.stop_when(max_epochs(len(grown)))
    JobRunner(job, tmp_path / "run").train()
    for epoch, text in enumerate(grown, 1):
        found = open_checkpoint(tmp_path / "run", epoch=epoch)
        sizes = {leaf.name: leaf.nbytes for leaf in found.manifest.leaves}
        assert sizes["shared"] == sizes["mine"] == len(text) + 2


@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=30))
def test_answers_are_those_of_their_questions_and_no_more_than_a_few_are_kept(size, asked) -> None:
    """Whatever was asked before, the answer fits; it is made anew only where the last few do not fit."""
    recent, made = Recent[tuple[int, object]](size), list[int]()

    def make(number: int) -> tuple[int, object]:
        made.append(number)
        return number, object()

    for number in asked:
        known = number in made[-size:]
        count = len(made)
        found = recent.get(lambda one, number=number: one[0] == number, lambda number=number: make(number))
        assert found[0] == number
        assert len(made) == count + (not known)


class Beside(Solo):
    """Another process, which has `told` leaves, to be heard with one change of how it tells of them."""

    def __init__(self, told: Described, change: dict[str, Any]) -> None:
        self.told, self.change = told, change

    def exchange(self, topic: str, value: Any, **_: Any) -> list[Any]:
        if topic == "save: leaves":
            return [value, [[[0, self.told.digest]], None]]
        row = class_json(self.told)
        row["specs"][0] |= self.change
        return [value, [row]]


def test_who_understands_leaves_otherwise_makes_another_plan() -> None:
    """What was heard of a class counts, not the digest under which it came: so ranks find the difference."""
    there = {"own": (tensor("own"), "replicated"), **first_node()}
    here, other = (
        state_of(rank, node, defaultdict(NodeHistory)) for rank, node in enumerate((first_node(), there))
    )

    def planned_with(change: dict[str, Any]) -> str:
        exchange = SpecExchange()
        told = Beside(Described(other.specs, other.scopes), change)
        return exchange.plan(*exchange.classes(told, [here], NAMES), (0, 0)).hash

    changes = [
        {},
        {"dtype": "bfloat16"},
        {"role": "buffer"},
        {"group": "optim"},
        {"shape": [9]},
        {"blob": "b"},
    ]
    found = list(map(planned_with, changes))
    assert len(set(found)) == len(found) and found[0] == planned_with({"name": "own"})
