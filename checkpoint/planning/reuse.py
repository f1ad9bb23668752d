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

from torchrelay.checkpoint.format.layouts import Layout
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest, has_odd_gradient
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import volume
from torchrelay.checkpoint.planning.assignments import Plan, PlannedLeaf, elements
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
