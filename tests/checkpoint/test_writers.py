"""Who writes something, asked of all nodes at once, is what each node by itself is told to write."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from meshes import Saved, random_mesh, random_shape

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.boxes import Replicated, Sharded
from torchrelay.checkpoint.disk.manifest import Manifest
from torchrelay.checkpoint.disk.mesh import Mesh
from torchrelay.checkpoint.planning.assignments import NodeClass, identity, identity_heads
from torchrelay.checkpoint.planning.plan import PLAN_VERSION, Question, plan_classes, plan_hash
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import DamagedError


def spec(name, shape, mesh=None, role=Role.PARAMETER, kind="tensor"):
    nbytes = 4
    for extent in shape:
        nbytes *= extent
    return LeafSpec(name, name.split(".")[0], role, "main", kind, "float32", shape, nbytes, sharding=mesh)


@pytest.mark.parametrize("seed", range(400))
def test_the_writers_of_a_mesh_are_the_nodes_that_store_a_box(seed):
    """Whatever the mesh, placements and shape, small boxes and large ones: no node too many, none too few."""
    rng = random.Random(seed)
    shape = random_shape(rng) if seed % 4 else (rng.choice([5, 600, 1031]), rng.choice([1024, 999]))
    mesh = random_mesh(rng, shape, most=16)
    for name in ("a", "b", "model.weight"):
        stored = {node for node, _ in mesh.stored(name, shape, 4)}
        assert set().union(*mesh.writers(name, shape, 4)) == stored
        per_node = [
            sum(_volume(box) * 4 for box in mesh.stored_by(node, name, shape, 4)) for node in mesh.nodes
        ]
        assert max(per_node) <= mesh.largest_share(shape, 4)


def _volume(box):
    found = 1
    for start, stop in box:
        found *= stop - start
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_writers_of_a_plan_are_the_nodes_with_files(seed):
    """Split, replicated, per-node and sharded leaves of several classes; nobody writes above the bound."""
    rng = random.Random(seed)
    nodes = rng.randint(1, 6)
    common = [spec(f"p.{i}", (rng.choice([1, 7, 300_000]),)) for i in range(rng.randint(0, 4))]
    common += [spec("buffer", (3,), role=Role.BUFFER), spec("mine", (5,), role=Role.TENSOR)]
    mesh = Mesh(tuple(range(nodes)), (nodes,), (rng.choice([Sharded(0), Replicated()]),))
    common.append(spec("sharded", (rng.choice([1, 3, 600]), 1024), mesh))
    own = [spec("last.stage", (40,))]
    classes = [NodeClass(tuple(range(nodes)), tuple(common))]
    if nodes > 1:
        classes = [
            NodeClass(tuple(range(nodes - 1)), tuple(common)),
            NodeClass((nodes - 1,), tuple(common + own)),
        ]
    plan = plan_classes(classes, scopes={"mine": "rank"})
    assert plan.writers == {(node, group) for node in range(nodes) for group in plan.files(node)}
    most = max(sum(one.nbytes for one in plan.assignments(node)) for node in range(nodes))
    assert most <= plan.largest_share


def test_an_identity_with_a_mesh_has_the_text_that_it_had_in_one_piece():
    """The hash of a plan, which manifests keep, does not depend on how its text is put together."""
    mesh = Mesh((4, 5, 6, 7), (2, 2), (Replicated(), Sharded(1, 2)))
    leaves = (spec("plain", (3, 4)), spec("sharded", (3, 4), mesh), spec('"\u00e4\n', (), kind="value"))
    for leaf, head in zip(leaves, identity_heads(leaves), strict=True):
        rest = b"" if leaf.sharding is None else b"," + leaf.sharding.text
        assert head + rest + b"]" == canonical.dumps(identity(leaf))


def test_the_hash_of_a_plan_is_of_one_canonical_text():
    """Hashed by parts, it stays the SHA-256 of one JSON object; manifests of earlier versions keep it."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), (Replicated(), Sharded(1, 2)))
    leaves = (spec("b", (3, 4), mesh), spec("a", (3,)), spec("c", (), kind="value"))
    for classes in ((), (NodeClass((0, 1, 2, 3), leaves),), (NodeClass((0,), leaves), NodeClass((1, 2), ()))):
        for options in (
            {},
            {"hosts": (0, 0, 1), "scopes": {"a": "rank"}, "referenced": frozenset({"c", "a"})},
        ):
            question = Question(classes, 512, **options)
            stated = {
                "version": PLAN_VERSION,
                "cut": 512,
                "scopes": question.scopes,
                "hosts": question.hosts and list(question.hosts),
                "referenced": sorted(question.referenced),
                "classes": [
                    [
                        list(one.nodes),
                        [
                            [*identity(leaf), leaf.kind == "value"]
                            for leaf in sorted(one.leaves, key=lambda leaf: leaf.name)
                        ],
                    ]
                    for one in classes
                ],
            }
            assert plan_hash(question) == canonical.sha256(canonical.dumps(stated))


def test_a_manifest_encoded_before_is_no_less_checked_and_has_the_same_bytes():
    """What is remembered of the tables never lets a missing shard, another world or a lost value pass."""
    manifest = Saved({"w": _whole()}, {"w": None}, 3).manifest()
    data = manifest.encode()
    assert replace(manifest).encode() == data
    assert Manifest.decode(data).encode() == data
    for shards in (manifest.shards[1:], manifest.shards[:1] * 2, ()):
        with pytest.raises(DamagedError):
            replace(manifest, shards=shards).encode()
    wrong = manifest.shards[0]._replace(header_sha256="x" * 64)
    with pytest.raises(DamagedError, match="no digest"):
        replace(manifest, shards=(wrong, *manifest.shards[1:])).encode()
    with pytest.raises(DamagedError):
        replace(manifest, world=replace(manifest.world, host_of=(9, 9, 9))).encode()
    with pytest.raises(DamagedError):
        replace(manifest, values={0: 1}).encode()
    later = replace(manifest, generation=manifest.generation + 1)
    assert {**json.loads(data), "generation": later.generation} == json.loads(later.encode())


def _whole():
    import torch

    return torch.arange(3 << 20, dtype=torch.uint8)
