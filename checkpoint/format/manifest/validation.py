"""Validate a manifest before it is used: names, ranges, sizes, duplicates, overlaps."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, le

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.manifest.schema import (
    BlobRow,
    Cut,
    Layout,
    LeafRow,
    Manifest,
    PerNode,
    ShardRow,
    Split,
    columns,
)
from torchrelay.checkpoint.format.mesh import MAX_SPLIT_FACTOR, Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.names import GROUP, LONGEST_NAME, NODE, check_attempt, first_of_each
from torchrelay.checkpoint.format.position import MAX_EPOCH
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

ROLES = ("parameter", "buffer", "optimizer", "tensor", "value", "state", "subclass", "rng", "gradient")
SCOPES = ("replicated", "sharded", "rank", "host")
LARGEST = 2**53 - 1
"""Sizes above this are not canonical JSON; no product of a shape may exceed it either."""
_MAX_MESH_DIMS = 32
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KIND = columns(BlobRow, "kind", "scope")
_COMMON = columns(LeafRow, "kind", "role", "dtype", "shape", "nbytes", "scope", "group", "layout", "source")
_FORM = columns(LeafRow, "shape", "nbytes")
_PLACE = columns(LeafRow, "layout", "source", "group")
_FILES = columns(ShardRow, "source", "group")
_NAME, _BLOB, _LAYOUT, _NODE = map(attrgetter, ("name", "blob", "layout", "node"))


@dataclass(frozen=True)
class RequiredFiles:
    """Nodes that must have a file of an attempt and group, because the leaf `name` is in it."""

    source: int
    group: str
    nodes: frozenset[int]
    name: str


def check_tables(manifest: Manifest, what: str) -> tuple[RequiredFiles, ...]:
    """Check world, blobs, leaves and layouts; returns which files they need."""
    demand = _demand(what)
    names = manifest.world.names
    demand(bool(manifest.world.nodes), "it has no nodes")
    demand(len(set(names)) == len(names), "a node is named twice")
    if not all(map(NODE.fullmatch, names)):
        name = next(name for name in names if not NODE.fullmatch(name))
        demand(False, f"invalid node name {name!r}")
    demand(len(manifest.world.host_of) == len(manifest.world.nodes), "hosts and nodes differ in number")
    demand(_within(manifest.world.host_of, len(manifest.world.hosts)), "a node is on an unknown host")
    blobs = {blob.name for blob in manifest.blobs}
    demand(len(blobs) == len(manifest.blobs), "a blob is named twice")
    _check_lengths(blobs, "blob", demand)
    for blob in first_of_each(map(_KIND, manifest.blobs), manifest.blobs).values():
        demand(blob.kind in ("tensor", "value", "stateful"), f"blob {blob.name} is of kind {blob.kind!r}")
        demand(blob.scope in SCOPES, f"blob {blob.name} has scope {blob.scope!r}")
    if not set(map(_BLOB, manifest.leaves)) <= blobs:
        leaf = next(leaf for leaf in manifest.leaves if leaf.blob not in blobs)
        demand(False, f"{leaf.name} is of unknown blob {leaf.blob!r}")
    for number, layout in enumerate(manifest.layouts):
        nodes = layout.nodes
        demand(bool(nodes) and len(set(nodes)) == len(nodes), f"layout {number} has a node twice, or none")
        demand(_within(nodes, len(manifest.world.names)), f"layout {number} has unknown nodes")
        if isinstance(layout, Mesh):
            demand(
                len(layout.extents) <= _MAX_MESH_DIMS
                and math.prod(layout.extents) == len(nodes)
                and len(layout.placements) == len(layout.extents),
                f"layout {number}: a mesh of {list(layout.extents)} does not have {len(nodes)} nodes",
            )
            splits = [one for one in layout.placements if isinstance(one, Sharded)]
            possible = all(one.dim >= 0 and one.split_factor >= 1 for one in splits)
            factor = math.prod(one.split_factor for one in splits)
            demand(possible and factor <= MAX_SPLIT_FACTOR, f"layout {number} has invalid placements")
        if isinstance(layout, Split):
            _check_split(manifest, layout, number, demand)
    _check_leaves(manifest, demand)
    # Check that a node has each name once, and that the targets of aliases exist.
    several = manifest.rows if len(set(map(_NAME, manifest.leaves))) < len(manifest.leaves) else {}
    for name, rows in several.items():
        if len(rows) > 1:
            holders = [node for row in rows for node in manifest.nodes_of(manifest.leaves[row])]
            demand(len(set(holders)) == len(holders), f"{name} occurs twice on one node")
    for stored in manifest.leaves:
        if stored.alias_of is not None:
            form = (stored.dtype, stored.shape, stored.kind)
            targets = [manifest.leaves[row] for row in manifest.rows.get(stored.alias_of, ())]
            fits = [one.alias_of is None for one in targets if (one.dtype, one.shape, one.kind) == form]
            demand(bool(fits) and all(fits), f"{stored.name} is an alias of nothing")
    for row in manifest.values:
        demand(0 <= row < len(manifest.leaves), f"a value is of unknown leaf {row}")
        leaf = manifest.leaves[row]
        demand(leaf.kind == "value" and leaf.scope == "replicated", f"{leaf.name} cannot have a value here")
    return tuple(_needed(manifest))


def check_files(manifest: Manifest, stored: Iterable[RequiredFiles], what: str) -> None:
    """Check the attempts and the shards, and that all required files exist."""
    demand = _demand(what)
    tries, position = manifest.tries, manifest.position
    demand(bool(tries) and len(set(tries)) == len(tries), f"its attempts are {tries}")
    for name in tries:
        check_attempt(name)
    demand(0 <= position.epoch <= MAX_EPOCH and 0 <= position.step < 10**9, f"its position is {position}")
    demand(
        tries[0].rpartition("-")[0] == position.directory("")[:-1], f"attempt {tries[0]} is not of {position}"
    )
    if not _plain(manifest):
        for shard in manifest.shards:
            name = f"the shard of node {shard.node}, group {shard.group}"
            demand(
                0 <= shard.node < len(manifest.world.names) and 0 <= shard.source < len(tries),
                f"{name} is of an unknown node or attempt",
            )
            demand(GROUP.fullmatch(shard.group) is not None, f"{name} has no group")
            demand(0 < shard.header_bytes <= shard.nbytes, f"{name} has an invalid size")
            demand(shard.nbytes <= LARGEST, f"{name} has an invalid size")
            demand(_SHA256.fullmatch(shard.header_sha256) is not None, f"{name} has no digest")
        for (_, node, group), parts in manifest.files.items():
            numbers = [shard.part for shard in parts]
            demand(
                numbers == list(range(1, len(parts) + 1)), f"node {node}, group {group} has parts {numbers}"
            )
    present: dict[tuple[int, str], set[int]] = defaultdict(set)
    for files, some in groupby(manifest.shards, _FILES):
        present[files].update(map(_NODE, some))
    for one in stored:
        missing = one.nodes - present[one.source, one.group]
        demand(not missing, f"the shard of node {min(missing, default=0)} that holds {one.name} is missing")


Demand = Callable[[bool, str], None]


def _demand(what: str) -> Demand:

    def demand(condition: bool, complaint: str) -> None:
        if not condition:
            raise DamagedError(f"{what} is damaged: {complaint}")

    return demand


def _check_lengths(names: Collection[str], what: str, demand: Demand) -> None:
    lengths = set(map(len, names))
    if lengths and not 0 < min(lengths) <= max(lengths) <= LONGEST_NAME:
        name = next(name for name in names if not 0 < len(name) <= LONGEST_NAME)
        demand(False, f"invalid {what} name {name!r:.80}")


def _check_split(manifest: Manifest, layout: Split, number: int, demand: Demand) -> None:
    """Check a split. Cuts rise, so only the last one within each leaf is compared with its size."""
    leaves, items, cuts = manifest.leaves, layout.items, layout.cuts
    demand(_within(items, len(leaves)) and len(set(items)) == len(items), f"layout {number}: its items")
    demand(
        len(cuts) == len(layout.nodes) + 1,
        f"layout {number} has {len(cuts)} cuts for {len(layout.nodes)} nodes",
    )
    end = Cut(len(items), 0)
    demand(cuts[0] == Cut(0, 0) and cuts[-1] == end, f"layout {number} does not cover its leaves")
    demand(all(map(le, cuts, cuts[1:])), f"the cuts of layout {number} overlap")
    inside = min(element for _, element in cuts) >= 0
    for item, element in dict(cuts).items():
        size = leaves[items[item]].elements if item < len(items) else 1
        inside = inside and element < max(size, 1)
    demand(inside, f"layout {number} is cut outside of leaves")
    for row in items:
        if leaves[row].layout != number:
            demand(False, f"{leaves[row].name} is split by two layouts")


def _check_leaves(manifest: Manifest, demand: Demand) -> None:
    """Check the leaves. Common properties are checked once, others for each leaf that differs."""
    _check_lengths([leaf.name for leaf in manifest.leaves], "leaf", demand)
    forms = first_of_each(map(_COMMON, manifest.leaves), manifest.leaves).values()
    for leaf in forms:
        name = leaf.name
        demand(leaf.scope in SCOPES, f"{name} has scope {leaf.scope!r}")
        demand(leaf.role in ROLES, f"{name} has role {leaf.role!r}")
        demand(GROUP.fullmatch(leaf.group) is not None, f"{name} is in group {leaf.group!r}")
        demand(0 <= leaf.layout < len(manifest.layouts), f"{name} has an unknown layout")
        demand(0 <= leaf.source < len(manifest.tries), f"{name} is in an unknown attempt")
        layout = manifest.layouts[leaf.layout]
        per_node = isinstance(layout, PerNode)
        demand(
            per_node == (leaf.scope in ("rank", "host")), f"{name} of scope {leaf.scope} has another layout"
        )
        if isinstance(layout, Split):
            demand(leaf.kind == "tensor", f"{name} is not among the leaves of its layout")
        if isinstance(layout, Mesh):
            dims = [one.dim for one in layout.placements if isinstance(one, Sharded)]
            possible = leaf.kind == "tensor" and leaf.scope == "sharded"
            demand(possible and max(dims, default=-1) < len(leaf.shape), f"{leaf.name} cannot be sharded so")
        demand(leaf.kind in ("tensor", "value"), f"{name} is of kind {leaf.kind!r}")
    for leaf in forms:  # once all are known to be of this version
        if leaf.kind == "value":
            demand(leaf.dtype is None and leaf.shape == (), f"value {leaf.name} has a dtype or a shape")
        else:
            demand(leaf.dtype is not None, f"tensor {leaf.name} has no dtype")
            size = dtypes.by_name(leaf.dtype or "").itemsize
            for extent in leaf.shape:
                # Checked before the product is computed: extents that overflow never meet an extent of zero.
                size *= max(extent, 1)
                demand(size <= LARGEST, f"the shape of {leaf.name} overflows")
            expected = 0 if 0 in leaf.shape else size
            demand(
                leaf.nbytes == expected,
                f"{leaf.name} has {leaf.nbytes} bytes, its shape and dtype need {expected}",
            )
    split = {n: layout.index for n, layout in enumerate(manifest.layouts) if isinstance(layout, Split)}
    for row, number in enumerate(map(_LAYOUT, manifest.leaves)) if split else ():
        if number in split and row not in split[number]:
            demand(False, f"{manifest.leaves[row].name} is not among the leaves of its layout")


def _plain(manifest: Manifest) -> bool:
    """Whether all shards are valid and of one part, by columns; False is not conclusive."""
    if not manifest.shards:
        return True
    nodes, groups, parts, sizes, headers, digests, sources = zip(*manifest.shards, strict=True)
    holders = set(zip(nodes, groups, sources, strict=True))
    return (
        set(parts) == {1}
        and len(holders) == len(nodes)
        and min(nodes) >= 0
        and max(nodes) < len(manifest.world.names)
        and min(sources) >= 0
        and max(sources) < len(manifest.tries)
        and all(GROUP.fullmatch(group) for group in set(groups))
        and min(headers) > 0
        and max(sizes) <= LARGEST
        and all(map(le, headers, sizes))
        and set(map(len, digests)) == {64}
        and _is_hex("".join(digests))
    )


def _is_hex(text: str) -> bool:
    """Whether this is lower-case hexadecimal; faster than a pattern for many digests."""
    try:
        return bytes.fromhex(text).hex() == text
    except ValueError:
        return False


def _needed(manifest: Manifest) -> Iterator[RequiredFiles]:
    """All required files; leaves in the same files need them once."""
    places: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    mixed = set()  # joined leaves of which files hold some, and others not
    for row, (leaf, place) in enumerate(zip(manifest.leaves, map(_PLACE, manifest.leaves), strict=True)):
        if leaf.alias_of is not None:
            mixed.add(leaf.layout)
        elif row not in manifest.values:
            places[place].append(row)
    mixed |= {number for number, some in Counter(number for number, _, _ in places).items() if some > 1}
    for (number, source, group), rows in places.items():
        held = _holders(manifest, manifest.layouts[number], rows, mixed=number in mixed)
        for nodes, name in held.items():
            yield RequiredFiles(source, group, nodes, name)


def _holders(
    manifest: Manifest, layout: Layout, rows: Sequence[int], *, mixed: bool
) -> dict[frozenset[int], str]:
    """The sets of nodes whose files hold leaves of a layout, each with the name of the first such leaf."""
    leaves = [manifest.leaves[row] for row in rows]
    if isinstance(layout, Mesh):
        return layout.writing([leaf.name for leaf in leaves], map(_FORM, leaves))
    if isinstance(layout, Split) and mixed:
        pieces = [layout.pieces(row, leaf.elements) for row, leaf in zip(rows, leaves, strict=True)]
        nodes = [frozenset(piece.node for piece in some) for some in pieces]
        return first_of_each(nodes, [leaf.name for leaf in leaves])
    return {frozenset(layout.writers): leaves[0].name}


def _within(numbers: Sequence[int], limit: int) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) < limit)
