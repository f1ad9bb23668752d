"""Sharded leaves: what meshes store is the tensor, and any mesh reads what any mesh wrote."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_hunt import hunt
from meshes import Saved, load, local_part, random_mesh, random_shape, target

from torchrelay.checkpoint.format import mesh_geometry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded, volume
from torchrelay.checkpoint.format.position import Selection
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.save.replicas import lone_parts, shared_parts
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role
from torchrelay.errors import DamagedError, FormatError, SaveFailedError

GOLDEN = Path(__file__).parents[1] / "golden"


def test_stored_boxes_cover_a_tensor_exactly_once():
    """On 3,000 random meshes, whatever the element size: no hole, no overlap, everyone within his part."""
    rng = random.Random(0)
    for _ in range(3000):
        shape = random_shape(rng)
        mesh, item = random_mesh(rng, shape), rng.choice([1, 4, 1 << 18, 1 << 20])
        stored = list(mesh.stored("name", shape, item))
        assert mesh_geometry.uncovered(shape, [box for _, box in stored]) is None
        for node, box in stored:
            own = [window.box for window in target(mesh, shape, node).windows]
            assert any(mesh_geometry.intersect(one, box) == box for one in own)


def test_replicas_share_the_writing():
    """Replicas of a large box write equal rows of it; small leaves go to different replicas."""
    mesh = Mesh(tuple(range(8)), (4, 2), (Replicated(), Sharded(1)))
    rows = sorted(box[0] for node, box in mesh.stored("w", (4096, 512), 4) if node % 2)
    assert rows == [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]
    owners = {rank for n in range(50) for rank in range(8) if mesh.stored_by(rank, f"w{n}", (4, 4), 4)}
    assert owners == set(range(8))


def test_thousands_of_replicas_write_no_crumbs():
    """A box of 16 MiB is cut into 16 pieces, whatever the number of replicas; all of these write."""
    mesh, shape = Mesh(tuple(range(200)), (200,), (Replicated(),)), (4096, 1024)
    written = Counter()
    for number in range(300):
        stored = list(mesh.stored(f"w{number}", shape, 4))
        assert [volume(box) * 4 for _, box in stored] == [1 << 20] * 16
        written.update(node for node, _ in stored)
    assert len(written) == 200 and max(written.values()) < 2.5 * 300 * 16 / 200


@pytest.mark.parametrize("rule", [1, 2])
def test_the_writers_of_a_mesh_are_those_of_its_rule(rule):
    """What is asked of all nodes at once, and of what lies near, is what each node by itself is told."""
    rng = random.Random(rule)
    for number in range(300):
        shape = rng.choice([random_shape(rng), (rng.choice([5, 600, 1031]), rng.choice([1024, 999]))])
        mesh, name = replace(random_mesh(rng, shape, most=16), rule=rule), f"w{number}"
        stored = list(mesh.stored(name, shape, 4))
        assert set().union(*mesh.writers(name, shape, 4)) == {node for node, _ in stored}
        everything = [tuple((0, extent) for extent in shape)]
        assert list(mesh.stored_near(name, shape, 4, everything)) == stored


@pytest.mark.parametrize("seed", range(10))
def test_any_mesh_reads_what_any_mesh_wrote(seed):
    """500 random pairs of meshes, plain tensors among them, reload bit for bit, in any memory for slabs."""
    assert hunt(50, seed) == []


def test_the_hunt_finds_a_reader_that_is_wrong(monkeypatch):
    """Parts read with two elements exchanged are told, with both meshes."""
    import mesh_pairs

    def wrong(reader, name, like, wanted):
        found = load(reader, name, like, wanted)
        return found if wanted is None or found.numel() < 2 else found.flatten().roll(1).reshape(found.shape)

    monkeypatch.setattr(mesh_pairs, "load", wrong)
    found = hunt(50, 0)
    assert found and all(one.read.nodes for one in found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=3), st.data())
def test_a_range_is_its_boxes(shape, data):
    """The boxes of a range of elements are these elements, in order."""
    count = mesh_geometry.volume(mesh_geometry.whole(shape))
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    space = torch.arange(count).reshape(shape)
    found = [
        n
        for box in mesh_geometry.range_boxes(shape, first, last)
        for n in space[tuple(slice(*side) for side in box)].flatten().tolist()
    ]
    assert found == list(range(first, last))


def test_a_column_is_read_without_the_whole():
    """A narrow part of wide rows does not read what lies between, beyond blocks."""
    whole = torch.arange(16 << 18, dtype=torch.float32).reshape(16, 1 << 18)
    saved = Saved({"m": whole}, {"m": Mesh((0,), (1,), (Replicated(),))}, 1)
    reader = saved.run()
    mesh = Mesh(tuple(range(64)), (64,), (Sharded(1),))
    before = saved.storage.bytes_read
    assert torch.equal(load(reader, "m", whole, target(mesh, whole.shape, 3)), local_part(whole, mesh, 3))
    assert saved.storage.bytes_read - before <= whole.nbytes * 1.1 + 8192


def test_damage_in_a_box_is_found():
    """A changed byte of a stored box fails whatever load needs it."""
    whole = torch.arange(64.0).reshape(8, 8)
    saved = Saved({"m": whole}, {"m": Mesh((0, 1), (2,), (Sharded(1),))}, 2)
    reader = saved.run()
    path = max(saved.storage.files)
    saved.storage.files[path][-1] ^= 1
    with pytest.raises(DamagedError, match="not what was saved"):
        load(reader, "m", whole, None)
    other = Mesh((0, 1), (2,), (Sharded(1),))
    assert torch.equal(load(reader, "m", whole, target(other, (8, 8), 0)), whole[:, :4])


def spec(mesh: Mesh) -> LeafSpec:
    return LeafSpec("m.w", "m", Role.PARAMETER, "main", "tensor", "float32", (8, 8), 256, None, mesh)


def test_sub_meshes_of_one_leaf_are_replicas():
    """A leaf that lies on several sub-meshes is one leaf: its replicas are one more mesh dimension."""
    rows = [NodeClass((a, b), (spec(Mesh((a, b), (2,), (Sharded(0),))),)) for a, b in ((0, 1), (2, 3))]
    plan = plan_classes(rows)
    assert plan.layouts == (Mesh((0, 1, 2, 3), (2, 2), (Replicated(), Sharded(0))),)
    assert [len(plan.assignments(node)) for node in range(4)].count(1) == 2


def test_a_mesh_must_be_complete():
    """A rank of the mesh that lacks the leaf, or has it placed otherwise, fails the save by name."""
    one, other = spec(Mesh((0, 1), (2,), (Sharded(0),))), spec(Mesh((0, 1), (2,), (Sharded(1),)))
    with pytest.raises(SaveFailedError, match=r"'m.w' is sharded over ranks \[0, 1\], but rank 1"):
        plan_classes([NodeClass((0,), (one,)), NodeClass((1,), (other,))])


def test_the_frozen_boxes_and_manifest_are_still_written(monkeypatch):
    """The rules give the committed boxes, today's writer the committed manifest; readers read old and new."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    import make_mesh

    assert make_mesh.box_rows(1) == json.loads((GOLDEN / "stored_boxes.json").read_text())
    assert make_mesh.box_rows(2) == json.loads((GOLDEN / "stored_boxes_rule2.json").read_text())
    old, new = (GOLDEN / f"manifest_mesh_{name}.json" for name in ("v1", "rule2"))
    assert _written_as_in(new.read_bytes(), make_mesh.manifest())
    for path, rule in ((old, 1), (new, 2)):
        read = codec.decode(path.read_bytes())
        assert codec.encode(read) == path.read_bytes()
        assert {layout.rule for layout in read.layouts if isinstance(layout, Mesh)} == {rule}


def test_the_frozen_manifest_that_refers_to_it_is_still_written_and_read(monkeypatch):
    """A referenced leaf lies where it lay, a wrapper is a value and its parts, what was left out is said."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    import make_referring

    data = (GOLDEN / "manifest_referring_rule2.json").read_bytes()
    assert _written_as_in(data, make_referring.manifest())
    for name in ("v1", "rule2"):
        _check_referring((GOLDEN / f"manifest_referring_{name}.json").read_bytes(), make_referring.earlier())


def _written_as_in(data, manifest):
    """Whether a manifest has these bytes but for the hash of its plan, which is that of a version."""
    return codec.encode(replace(manifest, plan_hash=codec.decode(data).plan_hash)) == data


def _check_referring(data, earlier):
    read = codec.decode(data)
    assert codec.encode(read) == data
    assert read.facts.selection == Selection(None, ("optimizer*",))
    (old,), (new,) = earlier.rows["model.all"], read.rows["model.all"]
    assert read.tries[read.leaves[new].source] == earlier.tries[0]
    assert read.layouts[read.leaves[new].layout] == earlier.layouts[earlier.leaves[old].layout]
    (row,) = read.rows["model.q"]
    assert (read.leaves[row].role, read.leaves[row].kind) == ("subclass", "value")
    assert all(f"model.q.{inner}" in read.rows for inner in read.values[row]["inner"])


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rule", 3, FormatError),
        ("mesh", [2, 3], DamagedError),
        ("mesh", [2, 0], DamagedError),
        ("mesh", ["2", 2], DamagedError),
        ("placements", [[0, 2]], DamagedError),
        ("placements", [[2, 1], [0, 1]], DamagedError),
        ("placements", [[-1, 1], [0, 1]], DamagedError),
        ("placements", [[0, 0], [0, 1]], DamagedError),
        ("placements", [[0, 1 << 40], [0, 1]], DamagedError),
        ("placements", [[0, 1, 1], [0, 1]], DamagedError),
        ("placements", None, DamagedError),
    ],
)
def test_meshes_that_no_writer_wrote_are_refused(key, value, error):
    """An unknown rule is another version; what does not fit is damage, and costs nothing to find."""
    raw = json.loads((GOLDEN / "manifest_mesh_v1.json").read_bytes())
    raw["layouts"][0][key] = value
    with pytest.raises(error):
        codec.decode(json.dumps(raw).encode())


def test_replicas_of_a_box_are_compared_and_named_by_it():
    """Places that hold the same box have a leaf of the same name to compare; lone boxes have none."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), (Replicated(), Sharded(0)))
    whole = torch.arange(64.0).reshape(8, 8)
    seen = []
    for node in range(4):
        leaf = Leaf("m.w", "m", Role.PARAMETER, "main", local_part(whole, mesh, node))
        (group,) = shared_parts({"m.w": leaf}, [spec(mesh)], node)
        (part,) = group.leaves
        seen.append((part.name, part.content[0, 0].item()))
    assert seen == [("m.w [0:4,0:8]", 0.0), ("m.w [4:8,0:8]", 32.0)] * 2
    alone = Mesh((0, 1), (2,), (Sharded(0),))
    assert shared_parts({"m.w": leaf}, [spec(alone)], 1) == []


def test_parts_on_several_meshes_have_the_names_of_their_place():
    """Of a leaf on two meshes the nodes at the same place have parts of one name, others never."""
    whole, names = torch.arange(64.0).reshape(8, 8), []
    for nodes in ((0, 1), (2, 3)):
        mesh = Mesh(nodes, (2,), (Sharded(0),))
        for node in nodes:
            leaf = Leaf("m.w", "m", Role.PARAMETER, "main", local_part(whole, mesh, node))
            (group,) = lone_parts({"m.w": leaf}, [spec(mesh)], node)
            assert group.lone and shared_parts({"m.w": leaf}, [spec(mesh)], node) == []
            names.append([one.name for one in group.leaves])
    assert names[0] == names[2] != names[1] == names[3]
    outside = Mesh((4, 5), (2,), (Sharded(0),))
    assert lone_parts({"m.w": leaf}, [spec(outside)], 3) == []
