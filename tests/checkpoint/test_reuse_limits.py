"""What is worth a reference: tries, halves, files; and which leaves are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epochs import Writing, parameter
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_replicas

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.dedup import (
    EarlierTry,
    comparable,
    in_bits,
    of_any,
    of_bits,
    same_leaves,
    within_limits,
)
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import spec_of

COUNT = 11
NAMES = [f"model.{index:02d}" for index in range(COUNT)]
BYTES = 8192


def leaves(size: int = BYTES // 4) -> list:
    return [parameter(name, torch.zeros(size + 4 * index)) for index, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """An epoch of which every leaf lies in a try of its own, the later leaves larger."""
    with Writing(tmp_path_factory.mktemp("spread")) as run:
        first = run.save(0, leaves())
        for epoch in range(1, COUNT):
            kept = [name for index, name in enumerate(NAMES) if index != epoch]
            first = run.save(epoch, leaves(), referenced=(run.manifests[first.position], kept))
        manifest = run.manifests[first.position]
    assert len(manifest.tries) == COUNT
    return manifest


def alone(manifest: Manifest, nbytes: int = BYTES) -> dict[str, EarlierTry]:
    return {name: EarlierTry(nbytes, frozenset({name})) for name in manifest.tries}


def test_at_most_8_tries_are_referenced(spread: Manifest) -> None:
    """The 8 of which most bytes are used."""
    assert within_limits(spread, NAMES, alone(spread)) == frozenset(NAMES[-8:])


def test_what_retention_keeps_along_counts(spread: Manifest) -> None:
    """A try that keeps 8 others alive is left."""
    largest = spread.tries[spread.leaves[spread.rows[NAMES[-1]][0]].source]
    known = {**alone(spread), largest: EarlierTry(BYTES, frozenset(f"other-{n}" for n in range(9)))}
    assert within_limits(spread, NAMES, known) == frozenset(NAMES[-9:-1])


def test_a_try_of_which_less_than_half_is_used_is_left_alone(spread: Manifest) -> None:
    """Half of it is enough; of a try that nobody knows nothing is used."""
    few = NAMES[:3]
    assert within_limits(spread, few, alone(spread, 2 * BYTES)) == frozenset(few)
    assert within_limits(spread, few, alone(spread, 2 * BYTES + 80)) == frozenset()
    assert within_limits(spread, few, {}) == frozenset()


def test_a_file_is_not_opened_for_less_than_its_header(tmp_path: Path) -> None:
    """Small leaves are referenced beside larger ones of their file, not alone."""
    with Writing(tmp_path) as run:
        entry = run.save(
            0, [parameter("model.large", torch.zeros(2000)), parameter("model.small", torch.zeros(9))]
        )
        manifest = run.manifests[entry.position]
    known = alone(manifest, 0)
    both = frozenset({"model.large", "model.small"})
    assert within_limits(manifest, both, known) == both
    assert within_limits(manifest, ["model.small"], known) == frozenset()


def test_only_the_same_leaves_are_referenced(spread: Manifest) -> None:
    """Another type, shape, blob, group, role, scope or alias is another leaf; so are other nodes."""
    spec = spec_of(leaves()[0])
    assert same_leaves(plan_replicas([spec], 1), ["trainer_0"], spread, NAMES) == {NAMES[0]}
    assert same_leaves(plan_replicas([spec], 3), ["a", "b", "c"], spread, NAMES) == {NAMES[0]}
    for changed in (
        {"dtype": "int32"},
        {"shape": (spec.shape[0] // 2, 2)},
        {"blob": "other"},
        {"group": "optim"},
        {"alias_of": NAMES[1]},
    ):
        plan = plan_replicas([replace(spec, **changed)], 1)
        assert same_leaves(plan, ["trainer_0"], spread, NAMES) == frozenset(), changed
    plan = plan_replicas([spec], 1, scopes={NAMES[0]: "rank"})
    assert same_leaves(plan, ["trainer_0"], spread, NAMES) == frozenset()
    some = plan_classes([NodeClass((0,), (spec,)), NodeClass((1,), ())])
    assert same_leaves(some, ["new", "trainer_0"], spread, NAMES) == frozenset()
    assert same_leaves(some, ["trainer_0", "new"], spread, NAMES) == {NAMES[0]}
    assert comparable(some) == (NAMES[0],)


@given(st.lists(st.text(max_size=3), unique=True), st.data())
def test_bits_say_which_names(order: list[str], data: st.DataObject) -> None:
    """Names go into bits and come out again."""
    some = frozenset(data.draw(st.lists(st.sampled_from(order)))) if order else frozenset()
    assert of_bits(in_bits(some, order), order) == some


@given(st.lists(st.text(max_size=3), unique=True), st.data())
def test_bits_of_several_are_brought_together(order: list[str], data: st.DataObject) -> None:
    """A name is among them where one of the processes has told it."""
    parts = data.draw(st.lists(st.sets(st.sampled_from(order)), max_size=4)) if order else []
    assert of_any((in_bits(part, order) for part in parts), order) == frozenset().union(*parts)
