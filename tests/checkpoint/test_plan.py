"""Planning of replicas: who writes which bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_replicas

from torchrelay.checkpoint.format.manifest import validation
from torchrelay.checkpoint.format.manifest.schema import Split
from torchrelay.checkpoint.save.assignments import NodeClass, cuts_between
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import LeafSpec, Role

CUT = 64  # bytes, in place of 1 MiB
ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "uint8": 1}
BOUNDED = settings(max_examples=150, deadline=None)


def tensor(name, count, dtype="float32", role=Role.PARAMETER, group="main"):
    return LeafSpec(name, "model", role, group, "tensor", dtype, (count,), count * ITEM[dtype])


def value(name, nbytes=10):
    return LeafSpec(name, name, Role.VALUE, "main", "value", None, (), nbytes)


@st.composite
def leaf_sets(draw):
    counts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    dtypes = [draw(st.sampled_from(sorted(ITEM))) for _ in counts]
    return [
        tensor(f"l{i}", count, dtype) for i, (count, dtype) in enumerate(zip(counts, dtypes, strict=True))
    ]


def written(plan, nodes):
    """Leaf name to the element ranges that nodes write, in order."""
    found = {}
    for node in range(nodes):
        for one in plan.assignments(node):
            found.setdefault(one.leaf.name, []).append((one.first, one.last))
    return {name: sorted(ranges) for name, ranges in found.items()}


@BOUNDED
@given(leaf_sets(), st.integers(1, 9))
def test_every_element_is_written_exactly_once(leaves, nodes):
    """Whatever the leaves and the number of nodes, coverage has no hole and no overlap."""
    found = written(plan_replicas(leaves, nodes, cut=CUT), nodes)
    for leaf in leaves:
        ranges = found[leaf.name]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == leaf.shape[0]
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert len(ranges) == 1 or all(a < b for a, b in ranges)


@BOUNDED
@given(leaf_sets(), st.integers(1, 9))
def test_every_share_is_near_the_ideal_one(leaves, nodes):
    """A node writes its ideal share, give or take one cut distance or the largest uncut leaf."""
    plan = plan_replicas(leaves, nodes, cut=CUT)
    total = sum(leaf.nbytes for leaf in leaves)
    step = max([CUT, *(leaf.nbytes for leaf in leaves if leaf.nbytes < CUT)])
    for node in range(nodes):
        share = sum(one.nbytes for one in plan.assignments(node))
        assert abs(share - total / nodes) <= step


@BOUNDED
@given(leaf_sets(), st.integers(1, 9))
def test_cuts_rise_and_lie_on_multiples_from_the_start_of_a_leaf(leaves, nodes):
    """Cuts are monotone; inside a leaf they lie at multiples of the cut distance, so digests do not move."""
    (split,) = plan_replicas(leaves, nodes, cut=CUT).layouts
    assert isinstance(split, Split)
    assert list(split.cuts) == sorted(split.cuts)
    by_row = sorted(leaves, key=lambda leaf: leaf.name)
    for cut in split.cuts[1:-1]:
        if cut.element:
            leaf = by_row[split.items[cut.item]]
            assert leaf.nbytes >= CUT
            assert cut.element * ITEM[leaf.dtype] % CUT == 0


@BOUNDED
@given(leaf_sets(), st.integers(1, 40))
def test_every_cut_is_the_candidate_that_is_nearest_to_its_ideal(leaves, shares):
    """Of two that are equally near it is the lower one, and before the empty leaves at its place."""
    sizes, widths = [leaf.nbytes for leaf in leaves], [ITEM[leaf.dtype] for leaf in leaves]
    starts = [sum(sizes[:item]) for item in range(len(sizes) + 1)]
    candidates = {start: (item, 0) for item, start in reversed(list(enumerate(starts)))}
    for item, (start, size, width) in enumerate(zip(starts, sizes, widths, strict=False)):
        inside = range(CUT, size, CUT) if size >= CUT else ()
        candidates.update({start + at: (item, at // width) for at in inside})
    for number, cut in enumerate(cuts_between(sizes, widths, shares, CUT)[1:-1], 1):
        nearest = min(candidates, key=lambda at: (abs(at * shares - starts[-1] * number), at))
        assert cut == candidates[nearest]


@BOUNDED
@given(leaf_sets(), st.integers(1, 6), st.randoms())
def test_all_ranks_make_the_same_plan(leaves, nodes, source: random.Random):
    """The plan does not depend on the order in which a rank lists its leaves; its hash tells plans apart."""
    shuffled = source.sample(leaves, len(leaves))
    one, other = plan_replicas(leaves, nodes, cut=CUT), plan_replicas(shuffled, nodes, cut=CUT)
    assert (one.hash, one.layouts) == (other.hash, other.layouts)
    assert [row.leaf for row in one.rows] == [row.leaf for row in other.rows]
    assert plan_replicas(leaves, nodes + 1, cut=CUT).hash != one.hash


def test_both_of_two_ranks_write_bytes_of_the_parameters_and_of_the_optimizer():
    """Parameters and optimizer state are split separately, so each is spread over all replicas."""
    names = ("weight", "bias", "head")
    leaves = [tensor(f"model.{n}", 100) for n in names]
    leaves += [tensor(f"optim.{n}", 100, role=Role.OPTIMIZER, group="optim") for n in names]
    plan = plan_replicas(leaves, 2)
    for node in (0, 1):
        assert {group: bool(found) for group, found in plan.files(node).items()} == {
            "main": True,
            "optim": True,
        }


def test_a_large_leaf_is_cut_at_a_mebibyte_and_a_small_one_is_not():
    """Leaves from 1 MiB on are cut inside, smaller ones only between."""
    large = plan_replicas([tensor("w", 1_000_000)], 2)
    assert [(a.first, a.last) for n in (0, 1) for a in large.assignments(n)] == [
        (0, 524288),
        (524288, 1_000_000),
    ]
    small = plan_replicas([tensor("w", 200_000)], 2)
    assert [len(small.assignments(n)) for n in (0, 1)] in ([1, 0], [0, 1])


def test_buffers_and_values_are_written_whole_by_the_first_replica():
    """Only parameters and optimizer tensors are split: buffers differ between replicas by design."""
    leaves = [
        tensor("running_mean", 3_000_000, role=Role.BUFFER),
        tensor("ema", 3_000_000, role=Role.TENSOR),
        value("total"),
    ]
    plan = plan_replicas(leaves, 3)
    assert [a.leaf.name for a in plan.assignments(0)] == ["ema", "running_mean", "total"]
    assert plan.assignments(1) == plan.assignments(2) == ()


def test_rank_leaves_are_written_by_every_node_and_host_leaves_once_per_host():
    """`rank` leaves belong to their node, `host` leaves to the lowest rank of each host."""
    plan = plan_replicas(
        [value("mine"), value("ours"), tensor("w", 10)],
        4,
        scopes={"mine": "rank", "ours": "host"},
        hosts=[0, 0, 1, 1],
    )
    writers = {
        name: [n for n in range(4) if name in {a.leaf.name for a in plan.assignments(n)}]
        for name in ("mine", "ours")
    }
    assert writers == {"mine": [0, 1, 2, 3], "ours": [0, 2]}


def test_small_replicated_values_go_into_the_manifest_and_others_into_shards():
    """Values of replicated blobs up to 64 KiB lie in the manifest; larger and per-node ones in shards."""
    plan = plan_replicas([value("a"), value("b", 70_000), value("c")], 2, scopes={"c": "rank"})
    assert {a.leaf.name: a.inline for a in plan.assignments(0)} == {"a": True, "b": False, "c": False}
    assert [a.leaf.name for a in plan.files(0)["main"]] == ["b", "c"]


def test_stages_of_a_pipeline_split_their_own_leaves_and_share_what_both_have():
    """Node classes: a replica set is every node whose class has an identical leaf."""
    shared = tensor("model.embedding", 64)
    classes = [
        NodeClass((0, 1), (shared, *(tensor(f"model.first.{i}", 64) for i in range(4)))),
        NodeClass((2, 3), (shared, *(tensor(f"model.second.{i}", 64) for i in range(4)))),
    ]
    plan = plan_classes(classes, cut=CUT)
    nodes = {row.leaf.name: plan.layouts[row.layout].nodes for row in plan.rows}
    assert nodes["model.embedding"] == (0, 1, 2, 3)
    assert nodes["model.first.0"] == (0, 1)
    assert nodes["model.second.3"] == (2, 3)
    found = written(plan, 4)
    assert found.keys() == nodes.keys()


def test_an_alias_is_written_by_nobody():
    """Ties are stored once."""
    tied = LeafSpec("model.b", "model", Role.PARAMETER, "main", "tensor", "float32", (10,), 40, "model.a")
    plan = plan_replicas([tensor("model.a", 10), tied], 2)
    assert [a.leaf.name for n in (0, 1) for a in plan.assignments(n)] == ["model.a"]
    assert len(plan.rows) == 2


def test_referenced_leaves_are_no_part_of_a_plan():
    """Leaves that an earlier try keeps are not written again."""
    plan = plan_replicas([tensor("a", 10), tensor("b", 10)], 2, referenced=["a"])
    assert [row.leaf.name for row in plan.rows] == ["b"]


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_empty_strings_and_empty_leaves_have_one_owner(shares):
    """Leaves without elements are owned by exactly one node too."""
    plan = plan_replicas([tensor("a", 0), tensor("b", 0)], shares)
    assert written(plan, shares) == {"a": [(0, 0)], "b": [(0, 0)]}
    assert len(cuts_between([], [], shares, CUT)) == shares + 1


def test_the_roles_of_the_format_are_those_of_leaves():
    """A manifest knows exactly the roles that leaves have, without importing torch."""
    assert {role.value for role in Role} == set(validation.ROLES)
