"""Which leaves a new epoch may refer to instead of writing them again. Pure.

Whether their bytes are unchanged others have found out; here it is whether the epoch on disk has the
same leaves for the same nodes, and whether a reference is worth what it keeps:

    at most 8 earlier tries                       each must be read and proved with the epoch; those
                                                  that retention keeps along with them count too
    at least half of a try's bytes still used     else a try is kept for the sake of a few
    at least 4 KiB used of a file                 less than what its header takes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.layouts import alike, holding
from torchrelay.checkpoint.format.manifest.schema import (
    OF_POSITION,
    Cut,
    Layout,
    LeafRow,
    Manifest,
    PerNode,
    Replicated,
    ShardRow,
    Split,
    has_odd_gradient,
    in_order,
)
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import volume
from torchrelay.checkpoint.save.planning.assignments import Plan, PlannedLeaf, elements
from torchrelay.records import dataclass

MAX_EARLIER_TRIES = 8
MIN_FILE_BYTES = 4096
_SCOPES = ("replicated", "rank", "sharded")
_Holder = tuple[int, int, str]


def comparable(plan: Plan) -> tuple[str, ...]:
    """The names of the leaves whose bytes are looked at, in order: tensors that are stored."""
    return tuple(sorted({planned.leaf.name for planned in plan.rows if _is_comparable(planned)}))


def _is_comparable(planned: PlannedLeaf) -> bool:
    """Random states and gradients are written always: whoever resumes needs them, and they change."""
    leaf = planned.leaf
    stored = leaf.kind == "tensor" and leaf.alias_of is None and leaf.nbytes > 0
    return stored and leaf.role.value not in OF_POSITION and planned.scope in _SCOPES


def same_leaves(
    plan: Plan, nodes: Sequence[str], manifest: Manifest, among: Collection[str]
) -> frozenset[str]:
    """Those of the names `among` whose leaves an epoch has exactly as the plan has them.

    That is: type, shape, role, scope, whether it has a gradient, and nodes, of a sharded leaf its mesh and
    placements, too; `nodes` are the names of the plan's nodes. A leaf that all nodes of both share is the
    same, however many nodes there are.
    """
    planned: dict[str, list[PlannedLeaf]] = {}
    for one in plan.rows:
        if one.leaf.name in among:
            planned.setdefault(one.leaf.name, []).append(one)
    return frozenset(
        name
        for name, rows in planned.items()
        if all(map(_is_comparable, rows)) and _alike(plan, rows, nodes, manifest)
    )


def _alike(plan: Plan, rows: Sequence[PlannedLeaf], nodes: Sequence[str], manifest: Manifest) -> bool:
    old = [manifest.leaves[row] for row in manifest.rows.get(rows[0].leaf.name, ())]
    if sorted(map(_of_plan, rows)) != sorted(map(_of_manifest, old)):
        return False
    if len(rows) == 1 and rows[0].scope == "replicated":
        world, known = set(range(len(nodes))), set(range(len(manifest.world.nodes)))
        if set(plan.layouts[rows[0].layout].nodes) == world and known <= set(manifest.nodes_of(old[0])):
            return True
    new_places = sorted(_places(plan.layouts[one.layout], nodes) for one in rows)
    return new_places == sorted(_places(manifest.layouts[one.layout], manifest.world.names) for one in old)


def _places(layout: Layout, names: Sequence[str]) -> list[str]:
    """Which nodes have a leaf; on a mesh, where in it each of them is, and what is split over them."""
    found = [names[node] for node in layout.nodes]
    if isinstance(layout, Mesh):
        return [repr(layout.extents), repr(layout.placements), *found]
    return sorted(found)


def _of_plan(one: PlannedLeaf) -> list[object]:
    leaf = one.leaf
    stated = (leaf.blob, leaf.group, leaf.role.value, leaf.dtype, leaf.shape, one.scope, elements(leaf))
    odd = has_odd_gradient(leaf.role.value, leaf.frozen)
    return _stated(*stated, odd, leaf.order, leaf.order_changed, leaf.device, leaf.same_as)


def _of_manifest(leaf: LeafRow) -> list[object]:
    if leaf.alias_of is not None:
        return []
    stated = (leaf.blob, leaf.group, leaf.role, leaf.dtype, leaf.shape, leaf.scope, leaf.elements)
    odd = leaf.gradient_is_odd
    return _stated(*stated, odd, leaf.order, leaf.order_changed, leaf.device, leaf.same_as)


def _stated(*of_leaf: object) -> list[object]:
    return [str(one) for one in of_leaf]


@dataclass(frozen=True)
class EarlierTry:
    """What counts for the limits: its data bytes, and the tries that stay as long as it is needed."""

    nbytes: int
    kept_with: frozenset[str]


def within_limits(
    manifest: Manifest, names: Collection[str], tries: Mapping[str, EarlierTry]
) -> frozenset[str]:
    """Those of the unchanged leaves `names` that are worth a reference.

    Leaves in a try that `tries` does not know are written again.
    """
    kept = frozenset(names)
    lying = _places_of(manifest, kept)
    while True:
        fewer = _worth_it(lying, kept, manifest, tries)
        if fewer == kept:
            return kept
        kept = fewer


def _worth_it(
    lying: Mapping[str, Sequence[_Place]],
    names: frozenset[str],
    manifest: Manifest,
    known: Mapping[str, EarlierTry],
) -> frozenset[str]:
    by_file: Counter[_Holder] = Counter()
    for place, leaves in Counter(place for name in names for place in lying[name]).items():
        for holder, nbytes in place.stored:
            by_file[holder] += nbytes * leaves
    by_try: Counter[str] = Counter()
    for (source, _, _), nbytes in by_file.items():
        by_try[manifest.tries[source]] += nbytes
    enough = {one: used for one, used in by_try.items() if one in known and used * 2 >= known[one].nbytes}
    tries: set[str] = set()
    along: frozenset[str] = frozenset()
    for one in sorted(enough, key=lambda one: (-enough[one], one)):
        if len(along | known[one].kept_with) <= MAX_EARLIER_TRIES:
            tries.add(one)
            along |= known[one].kept_with
    sources = {number for number, one in enumerate(manifest.tries) if one in tries}
    files = {holder for holder, used in by_file.items() if used >= MIN_FILE_BYTES and holder[0] in sources}
    return frozenset(name for name in names if _keeps(lying[name], sources, files))


def _keeps(places: Sequence[_Place], sources: Collection[int], files: Collection[_Holder]) -> bool:
    in_files = (holder for place in places for holder, _ in place.stored)
    return all(place.source in sources for place in places) and any(one in files for one in in_files)


@dataclass(frozen=True, eq=False)
class _Place:
    """The files in which a leaf lies, and how many bytes of it; leaves that lie alike share it."""

    source: int
    stored: tuple[tuple[_Holder, int], ...]


def _places_of(manifest: Manifest, names: Collection[str]) -> dict[str, list[_Place]]:
    alike: dict[tuple[object, ...], _Place] = {}
    found: dict[str, list[_Place]] = {}
    for name in names:
        for row in manifest.rows[name]:
            leaf = manifest.leaves[row]
            layout = manifest.layouts[leaf.layout]
            form = layout.alike(name, leaf.shape, leaf.item_bytes) if isinstance(layout, Mesh) else row
            key = (leaf.source, leaf.layout, leaf.group, form)
            if key not in alike:
                alike[key] = _Place(leaf.source, tuple(_stored(layout, row, leaf)))
            found.setdefault(name, []).append(alike[key])
    return found


def _stored(layout: Layout, row: int, leaf: LeafRow) -> Iterator[tuple[_Holder, int]]:
    """The files that hold a leaf, and how many bytes of it."""
    if isinstance(layout, Mesh):
        for node in frozenset[int]().union(*layout.writers(leaf.name, leaf.shape, leaf.item_bytes)):
            boxes = layout.stored_by(node, leaf.name, leaf.shape, leaf.item_bytes)
            yield (leaf.source, node, leaf.group), sum(map(volume, boxes)) * leaf.item_bytes
        return
    for piece in layout.pieces(row, leaf.elements):
        yield (leaf.source, piece.node, leaf.group), (piece.last - piece.first) * leaf.item_bytes


def own_bytes(manifest: Manifest) -> int:
    """The data bytes that a try itself wrote, headers aside."""
    return sum(shard.nbytes - shard.header_bytes for shard in manifest.shards if shard.source == 0)


def in_bits(names: Collection[str], order: Sequence[str]) -> str:
    """Which names in `order` are among `names`: one bit each, as hex."""
    bits = bytearray(-(-len(order) // 8))
    for index, name in enumerate(order):
        if name in names:
            bits[index // 8] |= 1 << index % 8
    return bits.hex()


def of_bits(bits: str, order: Sequence[str]) -> frozenset[str]:
    """The names that `in_bits` has put into these bits."""
    data = bytes.fromhex(bits)
    names = order[: 8 * len(data)]
    return frozenset(name for index, name in enumerate(names) if data[index // 8] >> index % 8 & 1)


def of_any(several: Iterable[str], order: Sequence[str]) -> frozenset[str]:
    """The names that are in any of several bits; a post of each of thousands of processes costs little."""
    merged = 0
    for bits in set(several):
        merged |= int.from_bytes(bytes.fromhex(bits), "little")
    return of_bits(merged.to_bytes(-(-len(order) // 8), "little").hex(), order)


def with_references(
    manifest: Manifest, earlier: Manifest, names: Collection[str], *, for_all: bool = False
) -> Manifest:
    """The manifest with the leaves `names` as `earlier` has them, planned with `referenced=names`.

    Whole leaves are referenced, wherever their bytes are (in tries, too, that `earlier` itself refers
    to), with the shard rows that hold them. An alias needs its target among the names or in the
    manifest. `for_all`: what all nodes of `earlier` share, all nodes of the new manifest have.
    """
    rows = sorted(row for name in names for row in earlier.rows[name])
    merging = _Merging(manifest, earlier, rows, for_all=for_all)
    return merging.merged()


def restricted(split: Split, nodes: tuple[int, ...], rows: Mapping[int, int]) -> Split:
    """A split of the rows that are keys of `rows`, under the numbers that `rows` and `nodes` give.

    A cut inside a leaf that is left out moves to the next leaf that is kept.
    """
    kept = [item for item, row in enumerate(split.items) if row in rows]
    before = {item: index for index, item in enumerate(kept)}
    for item in range(len(split.items), -1, -1):
        before.setdefault(item, before.get(item + 1, len(kept)))
    cuts = tuple(Cut(before[c.item], c.element if c.item in kept else 0) for c in split.cuts)
    return Split(nodes, tuple(rows[split.items[item]] for item in kept), cuts)


class _Merging:
    """Brings rows of an earlier manifest under the numbers of a new one."""

    def __init__(self, manifest: Manifest, earlier: Manifest, rows: list[int], *, for_all: bool) -> None:
        self.for_all = for_all
        self.new = manifest
        self.old = earlier
        self.rows = {row: len(manifest.leaves) + index for index, row in enumerate(rows)}
        self.tries = _numbering(manifest.tries)
        self.nodes = _numbering(manifest.world.names)
        layouts = sorted({earlier.leaves[row].layout for row in rows})
        self.layouts = {old: len(manifest.layouts) + index for index, old in enumerate(layouts)}

    def merged(self) -> Manifest:
        leaves = [self._leaf(self.old.leaves[row]) for row in self.rows]
        layouts = [self._layout(self.old.layouts[number]) for number in self.layouts]
        shards = [self._shard(shard) for shard in self._needed()]
        values = {self.rows[row]: json for row, json in self.old.values.items() if row in self.rows}
        known = {blob.name for blob in self.new.blobs}
        blobs = [b for b in self.old.blobs if b.name not in known and b.name in {x.blob for x in leaves}]
        own = len(self.new.world.nodes)
        return replace(
            self.new,
            tries=tuple(self.tries),
            world=replace(self.new.world, others=tuple(self.nodes)[own:]),
            blobs=tuple(sorted([*self.new.blobs, *blobs], key=lambda blob: blob.name)),
            leaves=(*self.new.leaves, *leaves),
            layouts=(*self.new.layouts, *layouts),
            shards=tuple(sorted({*self.new.shards, *shards}, key=in_order)),
            values={**self.new.values, **values},
        )

    def _leaf(self, leaf: LeafRow) -> LeafRow:
        return leaf._replace(source=self._try(leaf.source), layout=self.layouts[leaf.layout])

    def _layout(self, layout: Layout) -> Layout:
        nodes = tuple(self._node(node) for node in layout.nodes)
        if isinstance(layout, PerNode):
            return PerNode(nodes)
        if isinstance(layout, Mesh):
            return replace(layout, nodes=nodes)
        more = self._newcomers(layout, nodes)
        if isinstance(layout, Replicated):
            return Replicated(nodes + more)
        split = restricted(layout, nodes, self.rows)
        return Split(nodes + more, split.items, split.cuts + split.cuts[-1:] * len(more))

    def _newcomers(self, layout: Layout, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """The new nodes that have what all had before; they hold no bytes of it."""
        if not self.for_all or not set(range(len(self.old.world.nodes))) <= set(layout.nodes):
            return ()
        return tuple(node for node in range(len(self.new.world.nodes)) if node not in nodes)

    def _needed(self) -> Iterator[ShardRow]:
        holders: dict[tuple[int, int, str], None] = {}
        seen: set[tuple[object, ...]] = set()
        for row in self.rows:
            leaf = self.old.leaves[row]
            layout = self.old.layouts[leaf.layout]
            form = alike(layout, leaf)
            place = (leaf.source, leaf.group, leaf.layout, row if form is None else form)
            if leaf.alias_of is None and row not in self.old.values and place not in seen:
                seen.add(place)
                holders.update(
                    dict.fromkeys(
                        (leaf.source, node, leaf.group)
                        for nodes in holding(layout, row, leaf)
                        for node in sorted(nodes)
                    )
                )
        for holder in holders:
            yield from self.old.files[holder]

    def _shard(self, shard: ShardRow) -> ShardRow:
        return shard._replace(source=self._try(shard.source), node=self._node(shard.node))

    def _try(self, number: int) -> int:
        return self.tries.setdefault(self.old.tries[number], len(self.tries))

    def _node(self, number: int) -> int:
        return self.nodes.setdefault(self.old.world.names[number], len(self.nodes))


def _numbering(names: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}
