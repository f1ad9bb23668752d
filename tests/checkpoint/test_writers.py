"""Who writes something, asked of all nodes at once, is what each node by itself is told to write."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from meshes import Saved, random_mesh, random_shape

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import VALUE_LIMIT_BYTES
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.save.agreement import Described, class_json, class_of
from torchrelay.checkpoint.save.assignments import NodeClass, leaves_digest
from torchrelay.checkpoint.save.plan import PLAN_VERSION, plan_classes, plan_hash
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import DamagedError, UsageError


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


def test_the_leaves_of_a_mesh_ask_together_who_writes_them():
    """Asked of many leaves at once, the writers are those of each; every set has a leaf that it stores."""
    rng = random.Random(3)
    for _ in range(200):
        mesh = random_mesh(rng, (64, 64, 64), most=16)
        shapes = [(rng.choice([64, 600]), rng.choice([64, 1024]), 64) for _ in range(rng.randint(0, 9))]
        names = [f"w{rng.randrange(50)}.{number}" for number in range(len(shapes))]
        sizes = [math.prod(shape) * 4 for shape in shapes]
        found = mesh.writing(names, zip(shapes, sizes, strict=True))
        each = {n: mesh.writers(n, shape, 4) for n, shape in zip(names, shapes, strict=True)}
        assert set(found) == {nodes for some in each.values() for nodes in some}
        assert all(nodes in each[name] for nodes, name in found.items())


def test_the_digest_of_leaves_depends_on_all_of_them_and_not_on_their_order():
    """Whatever is changed of a leaf, the digest is another one; for the size of a small value it is not."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), (Replicated(), Sharded(1, 2)))
    first, value = spec("a.w", (3, 4), mesh), replace(spec("c", (), kind="value"), nbytes=3)
    leaves = (first, spec("b", (3,)), value)
    digest = leaves_digest(leaves)
    assert leaves_digest(leaves[::-1]) == digest
    for other in (2, VALUE_LIMIT_BYTES):
        assert leaves_digest((*leaves[:2], replace(value, nbytes=other))) == digest
    changes = [
        *({"name": "a.x"}, {"blob": "b"}, {"blob": "a.w"}, {"role": Role.BUFFER}, {"group": "optim"}),
        *({"kind": "value"}, {"dtype": "int32"}, {"dtype": None}, {"shape": (4, 3)}, {"nbytes": 47}),
        *({"alias_of": "b"}, {"sharding": None}, {"sharding": replace(mesh, nodes=(0, 1, 3, 2))}),
        *({"sharding": replace(mesh, rule=1)}, {"sharding": replace(mesh, extents=(4, 1))}),
    ]
    found = [leaves_digest((replace(first, **change), *leaves[1:])) for change in changes]
    found.append(leaves_digest((*leaves[:2], replace(value, nbytes=VALUE_LIMIT_BYTES + 1))))
    found += [leaves_digest(leaves[1:]), leaves_digest(()), digest]
    assert len(set(found)) == len(found)


def test_equal_meshes_are_one_mesh_however_many_objects_they_are():
    """Device meshes that differ in names alone give equal meshes: their digest, also when heard, is one."""
    one, other = (Mesh((0, 1), (2,), (Sharded(0),)) for _ in range(2))
    same, apart = ((spec("a", (4,), one), spec("b", (4,), mesh)) for mesh in (one, other))
    assert leaves_digest(same) == leaves_digest(apart)
    described = Described(apart, {"a": "rank"})
    heard = class_of(json.loads(json.dumps(class_json(described))))
    assert heard == described and heard.digest == Described(same, {"a": "rank"}).digest


def test_leaves_with_the_name_of_one_another_s_blob_are_told_apart():
    """A blob that is its leaf is not stated twice; no two sets of leaves are stated alike for that."""
    names = ("a", "b")
    sets = list(itertools.product([*names, "c"], repeat=2))
    found = {
        leaves_digest([replace(spec(name, (2,)), blob=blob) for name, blob in zip(names, blobs, strict=True)])
        for blobs in sets
    }
    assert len(found) == len(sets)


def test_the_hash_of_a_plan_is_of_one_canonical_text():
    """It is the SHA-256 of one JSON object, in which leaves stand as the digest that was exchanged."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), (Replicated(), Sharded(1, 2)))
    leaves = (spec("b", (3, 4), mesh), spec("a", (3,)), spec("c", (), kind="value"))
    for classes in ((), (NodeClass((0, 1, 2, 3), leaves),), (NodeClass((0,), leaves), NodeClass((1, 2), ()))):
        for scopes, hosts, referenced in (({}, None, ()), ({"a": "rank"}, (0, 0, 1), {"c", "a"})):
            stated = {
                "version": PLAN_VERSION,
                "cut": 512,
                "scopes": scopes,
                "hosts": hosts and list(hosts),
                "referenced": sorted(referenced),
                "classes": [[list(one.nodes), leaves_digest(one.leaves)] for one in classes],
            }
            found = plan_hash(classes, 512, scopes, hosts, referenced)
            assert found == canonical_json.sha256(canonical_json.dumps(stated))


def test_a_shape_that_no_json_holds_is_told():
    """A number of 2**53 or more is no canonical JSON, nor is half a character."""
    with pytest.raises(UsageError, match=r"an integer of 5\d bits"):
        leaves_digest([spec("a", (2**53,))])
    for change in ({"name": "\ud800"}, {"blob": "\ud800"}, {"alias_of": "\ud800"}):
        with pytest.raises(UsageError, match="lone surrogate"):
            leaves_digest([replace(spec("a", (2,)), **change)])


def test_a_manifest_encoded_before_is_no_less_checked_and_has_the_same_bytes():
    """What is remembered of the tables never lets a missing shard, another world or a lost value pass."""
    manifest = Saved({"w": _whole()}, {"w": None}, 3).manifest()
    data = codec.encode(manifest)
    assert codec.encode(replace(manifest)) == data
    assert codec.encode(codec.decode(data)) == data
    for shards in (manifest.shards[1:], manifest.shards[:1] * 2, ()):
        with pytest.raises(DamagedError):
            codec.encode(replace(manifest, shards=shards))
    wrong = manifest.shards[0]._replace(header_sha256="x" * 64)
    with pytest.raises(DamagedError, match="no digest"):
        codec.encode(replace(manifest, shards=(wrong, *manifest.shards[1:])))
    with pytest.raises(DamagedError):
        codec.encode(replace(manifest, world=replace(manifest.world, host_of=(9, 9, 9))))
    with pytest.raises(DamagedError):
        codec.encode(replace(manifest, values={0: 1}))
    later = replace(manifest, generation=manifest.generation + 1)
    assert {**json.loads(data), "generation": later.generation} == json.loads(codec.encode(later))


def _whole():
    import torch

    return torch.arange(3 << 20, dtype=torch.uint8)
