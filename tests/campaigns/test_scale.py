"""The simulation of very many ranks, small: what it checks, and the short cuts that make it possible."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from meshes import random_mesh, random_shape

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import parts_of, shard_path
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded, intersect
from torchrelay.checkpoint.load.verify import holders_of
from torchrelay.checkpoint.save import agreement
from torchrelay.checkpoint.state.leaf import LeafSpec, Role

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the parts of the benchmarks importable."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name == "bench" or name.startswith("bench.")]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "stages"])
def test_a_job_of_160_ranks_is_planned_committed_and_read_back(tmp_path: Path, kind: str):
    """All ranks plan alike and write every element once; a reader finds it and reads parts exactly."""
    from bench.scale import measured

    line = measured(tmp_path, kind, 160, 160, every=True)
    assert line["shares_ranks"] == 160 and line["read_blobs"] >= 1 and line["load_plan_bytes"] > 0
    (made, _) = sorted((tmp_path / "data").iterdir())
    manifest = codec.decode((made / "manifest.json").read_bytes())
    assert line["manifest_bytes"] < 30_000
    wanted = set()
    for row, leaf in enumerate(manifest.leaves):
        for node, _ in parts_of(manifest.layouts[leaf.layout], row, leaf):
            wanted.add((leaf.source, node, leaf.group))
    found = list(holders_of(manifest, range(len(manifest.leaves))))
    assert len(found) == len(set(found)) and set(found) == wanted
    assert {shard_path(manifest, row) for row in manifest.shards} == {
        f"data/{made.name}/{file.name}" for file in made.glob("*.safetensors")
    }


def test_a_simulation_of_something_wrong_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader that leaves out a part of what a rank needs is found."""
    from bench.scale import measured

    whole = Mesh.stored_near
    monkeypatch.setattr(Mesh, "stored_near", lambda *asked: whole(*asked)[1:])
    with pytest.raises(Exception, match="are inconsistent"):
        measured(tmp_path, "fsdp", 160, 160)


def test_parts_near_boxes_are_those_of_all_parts_that_touch_them():
    """On 3,000 random meshes: no part is missed, none is too many, in the same order."""
    rng, touched = random.Random(0), 0
    for number in range(3000):
        shape = random_shape(rng)
        mesh, item = random_mesh(rng, shape), rng.choice([1, 4, 1 << 20])
        wanted = [
            tuple(tuple(sorted(rng.choices(range(size + 1), k=2))) for size in shape)
            for _ in range(rng.choice([1, 1, 2]))
        ]
        near = list(mesh.stored_near(f"w{number}", shape, item, wanted))
        stored = mesh.stored(f"w{number}", shape, item)
        slow = [one for one in stored if any(intersect(one[1], box) is not None for box in wanted)]
        assert near == slow, (mesh, shape, wanted)
        touched += bool(near)
    assert touched > 1000


def test_a_class_of_leaves_names_its_meshes_once():
    """What a rank tells of its leaves grows with leaves plus nodes, and says the same when it has arrived."""
    large = Mesh(tuple(range(4096)), (512, 8), (Replicated(), Sharded(0)))
    small = Mesh((0, 1), (2,), (Sharded(0, 2),))
    specs = tuple(
        LeafSpec(f"w{n}", "m", Role.PARAMETER, "main", "tensor", "float32", (8, 8), 256, None, mesh)
        for n, mesh in enumerate([large, None, small, *[large] * 61])
    )
    scopes = {spec.name: "rank" if spec.name == "w1" else "replicated" for spec in specs}
    described = agreement.Described(specs, scopes)
    told = agreement.class_json(described)
    assert len(told["meshes"]) == 2 and len(str(told)) < 64_000
    read = agreement.class_of(told)
    assert (read, read.digest) == (described, described.digest)
    assert read.specs[0].sharding is read.specs[63].sharding
