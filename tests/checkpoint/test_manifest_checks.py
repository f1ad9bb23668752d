"""What a manifest must not say, asked of very many rows at once, is refused as it was row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import plan_replicas

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Cut, Manifest, ShardRow, Split
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.assignments import NodeClass, leaves_digest
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import DamagedError, SaveFailedError
from torchrelay.jobs.cluster import NodePlace

MIB = 1 << 20


def spec(name: str, mesh: Mesh | None = None) -> LeafSpec:
    return LeafSpec(name, name, Role.PARAMETER, "main", "tensor", "uint8", (MIB,), MIB, sharding=mesh)


def shard(node: int, group: str = "main", digest: str = "ab" * 32) -> ShardRow:
    return ShardRow(node, group, 1, 2 * MIB, 4096, digest)


def manifest(*specs: LeafSpec, shards: tuple[ShardRow, ...] = (shard(0), shard(1))) -> Manifest:
    """The leaves on two nodes, which share the bytes of replicas."""
    written = LeaseInfo("checks", "0" * 32, 0, 1), Position(1), "e00000001-0123456789ab"
    places = [NodePlace(f"trainer_{rank}", rank, 2) for rank in range(2)]
    return compose(plan_replicas(specs, 2), *written, world_of(places), shards, {}, Facts())


def with_leaf(found: Manifest, row: int, **change: object) -> Manifest:
    leaves = list(found.leaves)
    leaves[row] = leaves[row]._replace(**change)
    return replace(found, leaves=tuple(leaves))


def split_of(found: Manifest) -> Split:
    (layout,) = found.layouts
    assert isinstance(layout, Split)
    return layout


@pytest.mark.parametrize("digest", ["AB" * 32, " " + "ab" * 31 + "a", "ab" * 31 + " a", "xy" * 32, "ab" * 31])
def test_the_digest_of_a_shard_is_lower_case_hexadecimal(digest: str) -> None:
    """What bytes.fromhex takes besides, blanks and capitals, is refused."""
    assert codec.encode(manifest(spec("a"), spec("b")))
    with pytest.raises(DamagedError, match="no digest"):
        codec.encode(manifest(spec("a"), spec("b"), shards=(shard(0), shard(1, digest=digest))))


@pytest.mark.parametrize("cut", [Cut(1, -1), Cut(0, -1), Cut(0, MIB), Cut(1, MIB), Cut(2, 1), Cut(3, 0)])
def test_cuts_lie_inside_of_leaves(cut: Cut) -> None:
    """A cut before the first element of a leaf, behind its last one, or behind the last leaf is refused."""
    found = manifest(spec("a"), spec("b"))
    with pytest.raises(DamagedError, match="cut"):
        codec.encode(replace(found, layouts=(replace(split_of(found), cuts=(Cut(0, 0), cut, Cut(2, 0))),)))


def test_a_byte_string_over_two_groups_needs_the_files_that_hold_some_of_it() -> None:
    """Each half lies with one node: of each group only that node's file must be there."""
    found = with_leaf(manifest(spec("a"), spec("b")), 1, group="other")
    assert split_of(found).cuts[1] == Cut(1, 0)
    whole = replace(found, shards=(shard(0), shard(1, "other")))
    assert codec.decode(codec.encode(whole)) == whole
    for left, name in ((shard(0), "b"), (shard(1, "other"), "a")):
        with pytest.raises(DamagedError, match=f"that holds {name} is missing"):
            codec.encode(replace(found, shards=(left,)))


def test_an_alias_in_a_byte_string_needs_no_file() -> None:
    """It is stored under the other name alone, so its own node may have nothing."""
    found = with_leaf(manifest(spec("a"), spec("b")), 1, alias_of="a")
    whole = replace(found, shards=(shard(0),))
    assert codec.decode(codec.encode(whole)) == whole


def test_of_leaves_whose_file_is_missing_the_first_is_named() -> None:
    """Of many that lie in the same file, sharded ones and others."""
    mesh = Mesh((0, 1), (2,), (Sharded(0),))
    for specs in ([spec(name, mesh) for name in "abc"], [spec("a"), spec("b")]):
        with pytest.raises(DamagedError, match="that holds a is missing"):
            codec.encode(manifest(*specs, shards=(shard(0),)))


@pytest.mark.parametrize("change", [{"layout": -1}, {"layout": 2}, {"source": -1}, {"source": 1}])
def test_layouts_and_tries_of_leaves_are_there(change: dict[str, int]) -> None:
    """Counted from the end they are not there either."""
    found = manifest(spec("a"), spec("b"), replace(spec("mean"), role=Role.BUFFER))
    assert [leaf.name for leaf in found.leaves] == ["a", "b", "mean"] and len(found.layouts) == 2
    with pytest.raises(DamagedError, match=r"mean .*unknown (layout|attempt)"):
        codec.encode(with_leaf(found, 2, **change))


def test_a_shard_lies_in_a_try_that_is_there() -> None:
    """Counted from the end it does not."""
    with pytest.raises(DamagedError, match="is of an unknown node"):
        codec.encode(manifest(spec("a"), shards=(shard(0), shard(1)._replace(source=-1))))


def test_the_only_class_has_all_nodes_of_a_mesh() -> None:
    """A leaf whose mesh has a node that is not there fails the save by name."""
    leaves = (spec("a"), spec("m.w", Mesh((0, 1, 2), (3,), (Sharded(0),))))
    with pytest.raises(SaveFailedError, match=r"'m.w' is sharded over ranks \[0, 1, 2\], but rank 2"):
        plan_classes([NodeClass((0, 1), leaves)])


def test_plans_of_this_version_have_these_hashes() -> None:
    """Who changes what is hashed raises PLAN_VERSION, and then the second of these."""
    mesh = Mesh((0, 1), (2,), (Sharded(0),))
    value = LeafSpec("note", "note", Role.VALUE, "main", "value", None, (), 70_000)
    leaves = (spec("b", mesh), replace(spec("a"), blob="model"), value, replace(spec("c"), alias_of="b"))
    assert leaves_digest(leaves) == "ad04e5a13d374e4a87b6b61b1b51a2516929f072b1073c3e34cb96b40ed20baf"
    plan = plan_classes([NodeClass((0, 1), leaves)], scopes={"note": "rank", "a": "replicated"}, hosts=[0, 1])
    assert plan.hash == "1c502490de0a0ad9b7024918c153c94deaf5595bc55cd1ecab84b52ceb3910e1"
