"""Box arithmetic and the proof of coverage."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import local_boxes

from torchrelay.checkpoint.format import mesh_geometry
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded

GOLDEN = Path(__file__).parents[1] / "golden"


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    one = st.one_of(st.just(Replicated()), st.builds(Sharded, dims, st.sampled_from([1, 1, 2, 3])))
    return shape, mesh, draw(st.lists(one, min_size=len(mesh), max_size=len(mesh)))


def chunk(tensor, parts, index, dim):
    """Torch's own chunk, empty where torch gives fewer chunks than asked."""
    found = torch.chunk(tensor, parts, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


def local_by_torch(tensor, mesh, coordinate, placements):
    for places, place, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Sharded):
            blocks = [
                chunk(tensor, placement.split_factor, i, placement.dim) for i in range(placement.split_factor)
            ]
            tensor = torch.cat(
                [chunk(block, places, place, placement.dim) for block in blocks], placement.dim
            )
    return tensor


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_boxes_are_what_torch_chunks_give(layout):
    """The intervals give torch's local tensor element by element, the boxes hold the same elements."""
    shape, mesh, placements = layout
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        expected = local_by_torch(whole, mesh, coordinate, placements)
        local = whole
        for dim, size in enumerate(shape):
            intervals = mesh_geometry.local_intervals(size, dim, mesh, coordinate, placements)
            local = local[
                (slice(None),) * dim + (torch.tensor([i for r in intervals for i in range(*r)]).long(),)
            ]
        assert torch.equal(local, expected)
        held = [
            whole[tuple(slice(*i) for i in box)] for box in local_boxes(shape, mesh, coordinate, placements)
        ]
        assert sorted(i for part in held for i in part.flatten().tolist()) == sorted(
            expected.flatten().tolist()
        )


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_the_places_that_split_a_tensor_cover_it_exactly_once(layout):
    """One copy of each replica set is a proved cover; leaving one box out or giving one twice is not."""
    shape, mesh, placements = layout
    split = [range(n) if isinstance(p, Sharded) else range(1) for n, p in zip(mesh, placements, strict=True)]
    found = [b for c in itertools.product(*split) for b in local_boxes(shape, mesh, c, placements)]
    found = [box for box in found if mesh_geometry.volume(box)]
    assert mesh_geometry.uncovered(shape, found) is None
    for index in range(len(found)):
        assert "nothing covers" in mesh_geometry.uncovered(shape, found[:index] + found[index + 1 :])
        assert "2 boxes cover" in mesh_geometry.uncovered(shape, [*found, found[index]])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_runs_are_the_elements_of_a_box(data):
    """The runs of a box within a larger one name its elements in order, and no two runs touch needlessly."""
    outer = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3))
    outer = tuple((start, start + extent) for start, extent in outer)
    inner = tuple(sorted(data.draw(st.tuples(st.integers(a, b), st.integers(a, b)))) for a, b in outer)
    inner = tuple((a, b) for a, b in inner)
    space = torch.arange(mesh_geometry.volume(outer)).reshape([b - a for a, b in outer])
    local = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
    found = list(mesh_geometry.runs(outer, inner))
    assert [i for run in found for i in range(*run)] == space[local].flatten().tolist()
    assert mesh_geometry.volume(inner) == 0 or len(found) <= mesh_geometry.volume(inner)
    if inner == outer:
        assert len(found) == 1


def test_the_test_vectors_are_frozen(monkeypatch):
    """Today's arithmetic gives the committed boxes."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    from make_tables import box_rows

    assert box_rows() == json.loads((GOLDEN / "boxes.json").read_text())


@pytest.mark.parametrize(
    ("total", "ranges", "problem"),
    [
        (0, [], None),
        (10, [(4, 10), (0, 4), (4, 4)], None),
        (10, [], r"nothing covers \[0:10\]"),
        (10, [(0, 4), (5, 10)], r"nothing covers \[4:5\]"),
        (10, [(0, 6), (5, 10)], r"2 boxes cover \[5:6\]"),
        (10, [(0, 10), (0, 10)], r"2 boxes cover"),
        (10, [(0, 11)], "does not lie in"),
        (10, [(-1, 10)], "does not lie in"),
    ],
)
def test_ranges_cover_exactly_once_or_the_place_is_named(total, ranges, problem):
    """Holes, overlaps and what lies outside are named."""
    found = mesh_geometry.uncovered((total,), [(interval,) for interval in ranges])
    if problem is None:
        assert found is None
    else:
        assert re.search(problem, found)


def test_zero_dimensional_tensors_need_exactly_one_box():
    """The box of a 0-d tensor has no interval and one element."""
    assert mesh_geometry.uncovered((), [()]) is None
    assert mesh_geometry.uncovered((), []) is not None
    assert mesh_geometry.uncovered((), [(), ()]) is not None
    assert mesh_geometry.uncovered((0, 3), []) is None
    assert list(mesh_geometry.runs((), ())) == [(0, 1)]


def test_many_boxes_are_proved_quickly():
    """Thirty thousand boxes of a mesh are proved without comparing each with each."""
    grid = [((i, i + 1), (j, j + 1)) for i in range(150) for j in range(200)]
    assert mesh_geometry.uncovered((150, 200), grid) is None
    assert mesh_geometry.uncovered((150, 200), grid[:-1]) == "nothing covers [149:150,199:200]"
