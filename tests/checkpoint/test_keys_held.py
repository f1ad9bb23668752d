"""Under which keys nodes store leaves: what a proof expects in a file is what a reader looks for there."""

from __future__ import annotations

import random

import pytest
from meshes import random_mesh, random_shape

from torchrelay.checkpoint.format.manifest.schema import (
    Cut,
    LeafRow,
    PerNode,
    ReplicatedLayout,
    Split,
    keys_held,
    parts_of,
)
from torchrelay.checkpoint.format.names import format_key


def row(name, shape, kind="tensor"):
    count = 1
    for size in shape:
        count *= size
    return LeafRow(name, "m", kind, "parameter", "float32", tuple(shape), 4 * count, "replicated", "main", 0)


def agree(layout, leaf, nodes):
    expected = [(node, format_key(key)) for node, key in parts_of(layout, 0, leaf)]
    found = [(node, key) for node in nodes for key in keys_held(layout, node, 0, leaf)]
    assert sorted(found) == sorted(expected), (layout, leaf)
    return len(expected)


def test_the_keys_of_all_nodes_of_a_mesh_are_those_of_all_parts():
    """On 1,000 random meshes, with names that need an escape, and leaves without elements."""
    rng, found = random.Random(0), 0
    for number in range(1000):
        shape = random_shape(rng)
        mesh = random_mesh(rng, shape)
        name = rng.choice(["w", "a@b", "50%", "ü", f"layer.{number}"])
        found += agree(mesh, row(name, shape), (*mesh.nodes, max(mesh.nodes) + 1))
    assert found > 1000


@pytest.mark.parametrize("shape", [(), (0,), (7,), (4, 3)])
@pytest.mark.parametrize("name", ["w", "a@b", "__metadata__"])
def test_the_keys_of_all_nodes_are_those_of_all_parts(shape, name):
    """Of leaves that one node has whole, that each has for itself, and that are cut between two."""
    leaf = row(name, shape)
    middle = Cut(0, leaf.elements // 2)
    for layout in (
        ReplicatedLayout((1, 2)),
        PerNode((0, 2)),
        Split((0, 2), (0,), (Cut(0, 0), middle, Cut(1, 0))),
    ):
        agree(layout, leaf, range(4))
