"""Manifests: their bytes, their size, and what is refused before any of it is used."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_replicas

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import ShardRow
from torchrelay.checkpoint.format.manifest.validation import check_tables
from torchrelay.checkpoint.format.names import pack_names, pack_numbers, unpack_names, unpack_numbers
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import DamagedError, FormatError
from torchrelay.jobs.cluster import NodePlace

GOLDEN = Path(__file__).parent.parent / "golden"
DATA = (GOLDEN / "manifest_v1.json").read_bytes()


def changed(path, new):
    """The golden manifest with one field replaced (or taken away, for `new` None)."""
    raw = json.loads(DATA)
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    if new is DROP:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return json.dumps(raw).encode()


DROP = object()


def test_the_frozen_manifest_is_read_and_written_again_byte_for_byte():
    """What was written once is read and written for ever; only the hash of a plan is that of a version."""
    spec = importlib.util.spec_from_file_location("make_manifest", GOLDEN / "make_manifest.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    read = codec.decode(DATA)
    assert codec.encode(read) == DATA
    assert codec.encode(replace(maker.manifest(), plan_hash=read.plan_hash)) == DATA
    assert read.position == Position(3, 1200)
    assert read.needs == ("e00000003-abcdef",)
    assert read.world.names == ("trainer_0", "trainer_1", "trainer_2", "trainer_3", "helper:0")
    assert read.facts.seed == 2**60
    assert str(read.facts.metrics["val/acc"]) == "nan"
    assert read.extra == {"later": {"kept": True}}, "unknown keys are kept"


def test_the_frozen_manifest_says_where_every_element_lies():
    """Cut points, node classes and references are stored: reading needs no planning code."""
    read = codec.decode(DATA)
    where = {}
    for row, leaf in enumerate(read.leaves):
        if leaf.alias_of is None:
            pieces = read.layouts[leaf.layout].pieces(row, leaf.elements)
            where[leaf.name] = [
                (read.tries[leaf.source][:10], read.world.names[p.node], p.first, p.last) for p in pieces
            ]
    own, old = "e00000003s", "e00000003-"
    assert where["model.body"] == [
        (own, "trainer_0", 0, 262144),
        (own, "trainer_1", 262144, 524288),
        (own, "trainer_2", 524288, 786432),
        (own, "trainer_3", 786432, 1024000),
    ]
    assert where["model.frozen"] == [(old, "trainer_0", 0, 262144), (old, "helper:0", 262144, 524288)]
    assert [node for _, node, *_ in where["mine"]] == ["trainer_0", "trainer_1", "trainer_2", "trainer_3"]
    assert [node for _, node, *_ in where["ours"]] == ["trainer_0", "trainer_2"]
    assert [node for _, node, *_ in where["stage.b"]] == ["trainer_3"]


def test_a_frozen_manifest_says_who_owns_each_leaf():
    """The owners of a leaf are the nodes of its layout; one that all own alike is for any nodes."""
    manifest = codec.decode((GOLDEN / "manifest_owners_v1.json").read_bytes())
    found = {
        leaf.name: (sorted(manifest.owners_of(leaf)), manifest.is_shared(leaf)) for leaf in manifest.leaves
    }
    assert found["model.shared.weight"] == ([0, 1], True)
    assert found["model.expert0.weight"] == found["average"] == ([0], False)
    assert found["model.expert1.bias"] == ([1], False)
    assert found["own"] == ([0, 1], False), "alike by place, and each node's own"


def test_1000_blobs_on_10000_nodes_take_less_than_2_mb():
    """The size follows blobs + nodes, not their product."""
    nodes, blobs = 10_000, 1000
    half = blobs // 2
    specs = [
        LeafSpec(
            f"model.layers.{i}.mlp.weight",
            "model",
            Role.PARAMETER,
            "main",
            "tensor",
            "bfloat16",
            (4096, 11008 + i % 7),
            2 * 4096 * (11008 + i % 7),
        )
        for i in range(half)
    ] + [
        LeafSpec(
            f"optimizer.state.model.layers.{i}.mlp.weight.exp_avg",
            "optimizer",
            Role.OPTIMIZER,
            "optim",
            "tensor",
            "float32",
            (4096, 11008),
            4 * 4096 * 11008,
        )
        for i in range(half)
    ]
    specs.append(LeafSpec("rng.torch", "rng", Role.RNG, "main", "tensor", "uint8", (5056,), 5056))
    plan = plan_replicas(specs, nodes, scopes={"rng.torch": "rank"})
    places = [
        NodePlace(f"trainer_{rank}", rank, nodes, f"gpu-{rank // 8:05d}.cluster.local", rank // 8)
        for rank in range(nodes)
    ]
    shards = [
        ShardRow(
            node,
            group,
            1,
            4_423_680_000 + 4096 * (node * 7919 % 1000),
            90_112 + 4096 * (node * 104729 % 5),
            canonical_json.sha256(f"{node}{group}".encode()),
        )
        for node in range(nodes)
        for group in ("main", "optim")
    ]
    written = LeaseInfo("large", "0" * 32, 0, 1), Position(7), "e00000007-0123456789ab"
    manifest = compose(plan, *written, world_of(places), shards, {}, Facts())
    data = codec.encode(manifest)
    assert len(data) < 2_000_000
    assert codec.decode(data) == manifest


def test_a_layout_of_a_kind_that_is_reserved_is_refused_by_format():
    """`boxes` and what comes after it are errors that say so, not damage."""
    for kind in ("boxes", "spiral"):
        with pytest.raises(FormatError, match=kind):
            codec.decode(changed(["layouts", 0, "kind"], kind))


@pytest.mark.parametrize(
    "stamp", [{"major": 2, "minor": 0, "features": []}, {"major": 1, "minor": 0, "features": ["dreams"]}]
)
def test_another_major_version_or_an_unknown_feature_is_refused(stamp):
    """A reader refuses what it does not know, and a newer minor version is none of that."""
    with pytest.raises(FormatError):
        codec.decode(changed(["format"], stamp))
    assert codec.decode(changed(["format"], {"major": 1, "minor": 9, "features": []}))


BAD = [
    (["format"], DROP), (["format"], 1), (["job"], []), (["job", "uuid"], 7), (["position", "epoch"], -1),
    (["position", "epoch"], True), (["position", "epoch"], 10**9), (["position", "step"], 1201),
    (["branch"], "0"), (["generation"], 1.5), (["tries"], []), (["tries"], ["../../etc"]),
    (["tries", 0], "e00000004-0123456789ab"), (["tries", 1], "e00000003s001200-0123456789ab"),
    (["plan"], None), (["facts"], DROP), (["facts", "metrics"], {"a": "b"}), (["facts", "stop"], {"a": 1}),
    (["facts", "elapsed_secs"], "1"), (["facts", "seed"], "x"), (["facts", "over"], 0),
    (["world", "nodes"], []), (["world", "nodes"], ["a", "b", "c", "../d"]),
    (["world", "nodes"], ["a", "a", "b", "c"]),
    (["world", "nodes"], [["trainer_", 0, 10**12]]), (["world", "nodes"], [["trainer_", -1, 4]]),
    (["world", "others"], ["trainer_0"]), (["world", "host_of"], [0, 0, 1]),
    (["world", "host_of"], [0, 0, 1, 2]),
    (["classes", 0], [0, 0]), (["classes", 0], [99]), (["classes", 0], [-1]), (["classes", 0], []),
    (["classes", 0], [[0, 1, 10**9]]), (["classes", 0], "x"), (["layouts", 0, "class"], 99),
    (["words"], "x"), (["words", 0], 3), (["blobs", "name"], ["a"]), (["blobs", "kind"], [99] * 8),
    (["leaves", "layout", 0], 99), (["leaves", "shape", 0], [-1]), (["leaves", "shape", 0], [2**31, 2**31]),
    (["leaves", "shape", 0], [0, 2**52]), (["leaves", "shape", 0], [1.0]), (["leaves", "shape"], []),
    (["leaves", "bytes", 1], 13), (["leaves", "bytes", 0], -1), (["leaves", "dtype"], []),
    (["leaves", "alias_of"], [[99, "model.body"]]), (["leaves", "alias_of"], [[0, "nothing"]]),
    (["leaves", "alias_of"], [[0, "model.body"]]), (["leaves", "try"], [9] * 11),
    (["leaves", "name"], [""] * 11),
    (["leaves", "name"], ["x"] * 11), (["leaves", "name"], DROP),
    (["shards", "node"], [99] * 11), (["shards", "part"], [1] * 10 + [3]), (["shards", "bytes"], [1] * 11),
    (["shards", "header_bytes"], [0] * 11), (["shards", "header_bytes"], [10**9] * 11),
    (["shards", "header_sha256"], "AAAA"), (["shards", "header_sha256"], "%"), (["shards"], DROP),
    (["shards", "node"], []), (["values"], [[99, 1]]), (["values"], [[0, 1], [0, 1]]), (["values"], [[3]]),
    (["values"], {}), (["leaves"], None), (["layouts"], {}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "new"), BAD)
def test_a_manifest_that_cannot_be_is_refused(path, new):
    """Ranges, names, sizes, duplicates and types are checked before anything is used."""
    with pytest.raises((DamagedError, FormatError)):
        codec.decode(changed(path, new))


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""}, {"blob": "absent"}, {"scope": "host"}, {"role": "none"}, {"group": "Main"},
        {"layout": 99}, {"source": 99}, {"kind": "none"}, {"dtype": None}, {"dtype": "float64"},
        {"shape": (1,)}, {"nbytes": 1},
    ],
)  # fmt: skip
def test_a_leaf_that_cannot_be_is_refused_behind_others_that_can(change):
    """What leaves have in common is checked once; the last of many like it is still not believed unseen."""
    manifest = codec.decode(DATA)
    model = next(
        leaf
        for leaf in manifest.leaves
        if leaf.kind == "tensor" and leaf.scope == "replicated" and not manifest.layouts[leaf.layout].split
    )
    alike = [model._replace(name=f"more.{number}") for number in range(3)]
    check_tables(replace(manifest, leaves=(*manifest.leaves, *alike)), "manifest")
    alike[-1] = alike[-1]._replace(**change)
    with pytest.raises((DamagedError, FormatError)):
        check_tables(replace(manifest, leaves=(*manifest.leaves, *alike)), "manifest")


def test_split_leaves_are_covered_exactly_or_refused():
    """Cut points that leave a hole, overlap, or lie outside of their leaf are refused."""
    raw = json.loads(DATA)
    number = next(i for i, one in enumerate(raw["layouts"]) if one.get("items") == [1])
    good = raw["layouts"][number]
    for key, new in [
        ("cut_items", [1, 0, 0, 0, 1]), ("cut_items", [0, 0, 0, 0, 0]), ("cut_items", [0, 0, 0, 1]),
        ("cut_elements", [0, 600000, 524288, 786432, 0]), ("cut_elements", [0, 1, 2, 99999999, 0]),
        ("cut_elements", [0, -1, 2, 3, 0]), ("items", []), ("items", [99]), ("items", good["items"] * 2),
    ]:  # fmt: skip
        with pytest.raises(DamagedError):
            codec.decode(changed(["layouts", number, key], new))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_a_flipped_bit_never_does_anything_but_a_clear_error(byte, bit):
    """Even past the digest, a damaged manifest is read or refused, never an exception of another kind."""
    damaged = bytearray(DATA)
    damaged[byte] ^= 1 << bit
    with contextlib.suppress(DamagedError, FormatError):
        codec.decode(bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_manifest_is_refused(length):
    """No prefix of a manifest is a manifest."""
    with pytest.raises(DamagedError):
        codec.decode(DATA[:length])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-5, 5) | st.integers(0, 2**40), max_size=30), st.integers(0, 20))
def test_packed_numbers_come_back(numbers, run):
    """Packing is lossless, whatever the numbers."""
    numbers += list(range(7, 7 + run)) + [3] * run
    assert unpack_numbers(pack_numbers(numbers), "x") == tuple(numbers)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", "a1", "a2", "a03", "b_1", "b_2", "b_3", "b_4", "b_5", "9", "10"]), max_size=30
    )
)
def test_packed_names_come_back(names):
    """Packing is lossless, leading zeros included."""
    names += [f"n{i}" for i in range(len(names))]
    assert unpack_names(pack_names(names), "x") == tuple(names)
