"""Decide which node writes which bytes of an epoch: pure, computed alike by every rank without messages.

- Parameters and optimizer tensors are split between the nodes that replicate them. They form one byte string
  per replica set and group (item size descending, then name), so that each is spread over all replicas.
- Other replicated leaves are written whole by the first replica.
- `rank` leaves are written by their node, `host` leaves by the lowest rank of each host that has them.
- Sharded leaves are on a mesh, whose rule decides who stores which box.

Nodes may have different leaves (pipeline stages): a plan is made for node classes, and a replica set is every
node whose class has an identical leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.manifest.schema import (
    Cut,
    Layout,
    Manifest,
    PerNode,
    ReplicatedLayout,
    ShardRow,
    Split,
    alike,
    holding,
    in_order,
    table,
)
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated as ReplicatedPlacement
from torchrelay.checkpoint.format.names import first_of_each
from torchrelay.checkpoint.save.assignments import (
    CUT_BYTES,
    NodeClass,
    PlannedLeaf,
    SavePlan,
    cuts_between,
    item_bytes,
    same,
)
from torchrelay.errors import SaveFailedError

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec


Held = tuple["LeafSpec", tuple[int, ...]]
"""A leaf and the nodes that have it."""


def joined(held: Sequence[Held]) -> list[Held]:
    """Merge replicas of one name and form on several sub-meshes into one leaf on one mesh.

    The joined mesh has the sub-meshes, by their first nodes, along a new first dimension. Raises
    SaveFailedError, naming the leaf, if a node of a mesh lacks it, or sub-meshes overlap.
    """
    distinct = [(id(leaf.sharding), id(nodes)) for leaf, nodes in held]  # many are the same objects
    for leaf, nodes in first_of_each(distinct, held).values():
        check_complete(leaf, nodes)
    named: dict[str, list[Held]] = {}
    for leaf, nodes in held:
        named.setdefault(leaf.name, []).append((leaf, nodes))
    return [one for group in named.values() for one in (group if len(group) == 1 else _joined_forms(group))]


def _joined_forms(group: Sequence[Held]) -> list[Held]:
    """Merge leaves of one name that differ only in the nodes of their mesh."""
    found: list[Held] = []
    alike: dict[LeafSpec, list[Held]] = {}
    for leaf, nodes in group:
        if leaf.sharding is None:
            found.append((leaf, nodes))
        else:
            apart = replace(leaf, sharding=replace(leaf.sharding, nodes=()))
            alike.setdefault(apart, []).append((leaf, nodes))
    return found + [_joined(some) if len(some) > 1 else some[0] for some in alike.values()]


def _joined(group: Sequence[Held]) -> Held:
    leaf = group[0][0]
    meshes = sorted((leaf.sharding for leaf, _ in group if leaf.sharding), key=lambda mesh: min(mesh.nodes))
    places = tuple(node for mesh in meshes for node in mesh.nodes)
    if len(set(places)) != len(places):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over meshes that overlap ({', '.join(str(m.nodes) for m in meshes)}): "
            "build the same device mesh on all ranks"
        )
    extents = (len(meshes), *meshes[0].extents)
    whole = replace(
        meshes[0], nodes=places, extents=extents, placements=(ReplicatedPlacement(), *meshes[0].placements)
    )
    return replace(leaf, sharding=whole), tuple(sorted({node for _, some in group for node in some}))


def check_complete(leaf: LeafSpec, nodes: Sequence[int]) -> None:
    """Raise SaveFailedError, naming the leaf, if a node of its mesh lacks it."""
    mesh = leaf.sharding
    if mesh is not None and (absent := sorted(set(mesh.nodes) - set(nodes))):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over ranks {list(mesh.nodes)}, but rank "
            f"{', '.join(map(str, absent))} lacks it or has other placements: build it with the same "
            "device mesh and placements on all ranks of the mesh"
        )


PLAN_VERSION = 2
SPLIT_ROLES = ("parameter", "optimizer")


def plan_classes(
    classes: Sequence[NodeClass],
    *,
    cut: int = CUT_BYTES,
    scopes: Mapping[str, str] | None = None,
    hosts: Sequence[int] | None = None,
    referenced: Collection[str] = (),
) -> SavePlan:
    """Plan a save of nodes of several classes.

    `scopes` is the scope of leaves by name (default `replicated`), `hosts` the host number of every node.
    Leaves in `referenced` are unchanged since an earlier attempt, which keeps them: they are not written and
    have no rows.
    """
    held, given = _holders(classes, frozenset(referenced)), scopes or {}
    rows = tuple(leaf for leaf, _ in held)
    layouts, numbers = _Layouts(), [-1] * len(rows)
    stated = ["sharded" if one.sharding is not None else given.get(one.name, "replicated") for one in rows]
    strings: dict[tuple[int, str], tuple[tuple[int, ...], list[int]]] = {}  # of node sets by identity
    for row, (leaf, nodes) in enumerate(held):
        if leaf.sharding is not None:
            numbers[row] = layouts.number(leaf.sharding)
        elif (
            stated[row] == "replicated"
            and leaf.kind == "tensor"
            and leaf.role.value in SPLIT_ROLES
            and leaf.alias_of is None
        ):
            strings.setdefault((id(nodes), leaf.group), (nodes, []))[1].append(row)
        else:
            numbers[row] = layouts.unsplit(stated[row], nodes, hosts)
    for nodes, _, members in sorted((nodes, group, rows) for (_, group), (nodes, rows) in strings.items()):
        widths = {row: item_bytes(rows[row]) for row in members}  # in the order of their names
        order = sorted(members, key=widths.__getitem__, reverse=True)
        cuts = cuts_between(
            [rows[row].nbytes for row in order], [widths[row] for row in order], len(nodes), cut
        )
        number = layouts.number(Split(nodes, tuple(order), cuts))
        for row in members:
            numbers[row] = number
    planned = table(PlannedLeaf, zip(rows, stated, numbers, strict=True))
    return SavePlan(planned, tuple(layouts.found), plan_hash(classes, cut, given, hosts, referenced))


def unusual(scopes: Mapping[str, str]) -> dict[str, str]:
    """Scopes by name, without the default `replicated`."""
    return {name: scope for name, scope in scopes.items() if scope != "replicated"}


def plan_hash(
    classes: Sequence[NodeClass],
    cut: int,
    scopes: Mapping[str, str],
    hosts: Sequence[int] | None,
    referenced: Collection[str],
) -> str:
    """SHA-256 (hex) over all that decides a plan; ranks compare it before they write."""
    rows = [
        b"[%b,%b]" % (canonical_json.dumps_read(one.nodes), canonical_json.dumps(one.digest))
        for one in classes
    ]
    stated = {
        "version": canonical_json.dumps(PLAN_VERSION),
        "cut": canonical_json.dumps(cut),
        "scopes": canonical_json.dumps(unusual(scopes)),
        "hosts": canonical_json.dumps_read(None if hosts is None else tuple(hosts)),
        "referenced": canonical_json.dumps(sorted(referenced)),
        "classes": b"[%b]" % b",".join(rows),
    }
    return canonical_json.sha256(canonical_json.object_of(stated))


def _holders(
    classes: Sequence[NodeClass], referenced: frozenset[str]
) -> list[tuple[LeafSpec, tuple[int, ...]]]:
    """Every distinct leaf with the nodes that have it, by name and first node."""
    if len(classes) == 1:  # within a class names differ
        nodes = tuple(sorted(classes[0].nodes))
        leaves = [
            leaf for leaf in sorted(classes[0].leaves, key=attrgetter("name")) if leaf.name not in referenced
        ]
        for leaf in first_of_each([id(leaf.sharding) for leaf in leaves], leaves).values():
            check_complete(leaf, nodes)
        return [(leaf, nodes) for leaf in leaves]
    found: dict[object, tuple[LeafSpec, list[int]]] = {}
    unlike = shared_unlike(classes)
    for number, node_class in enumerate(classes):
        for leaf in node_class.leaves:
            if leaf.name not in referenced:
                first, numbers = found.setdefault(key := same(leaf), (leaf, []))
                numbers.append(number)
                same_as = None if leaf.name in unlike else first.same_as or leaf.same_as
                if same_as != first.same_as:
                    found[key] = replace(first, same_as=same_as), numbers
    sets: dict[tuple[int, ...], tuple[int, ...]] = {}
    held = []
    for leaf, numbers in found.values():
        some = tuple(numbers)
        if some not in sets:
            sets[some] = tuple(sorted(node for number in some for node in classes[number].nodes))
        held.append((leaf, sets[some]))
    return sorted(joined(held), key=lambda pair: (pair[0].name, pair[1]))


def shared_unlike(classes: Sequence[NodeClass]) -> dict[str, str]:
    """Leaves that are aliases of the leaf of the second name on some nodes, and separate on others.

    The plan treats these as separate on all nodes, because loads check that both exist.
    """
    shared = {leaf.name: leaf.same_as for one in classes for leaf in one.leaves if leaf.same_as is not None}
    found: dict[str, str] = {}
    for some in [one.leaves for one in classes] if shared else ():
        known = {leaf.name: leaf.same_as for leaf in some}
        unlike = {name: other for name, other in shared.items() if known.get(name, other) != other}
        found.update({name: other for name, other in unlike.items() if other in known or known[name]})
    return found


class _Layouts:
    """Numbers layouts, equal ones once. Identical objects, which are frequent, are not compared."""

    def __init__(self) -> None:
        self.found: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._same: dict[object, int] = {}
        self._kept: list[Layout] = []

    def number(self, layout: Layout) -> int:
        if id(layout) not in self._same:
            if layout not in self._numbers:
                self._numbers[layout] = len(self.found)
                self.found.append(layout)
            self._same[id(layout)] = self._numbers[layout]
            self._kept.append(layout)
        return self._same[id(layout)]

    def unsplit(self, scope: str, nodes: tuple[int, ...], hosts: Sequence[int] | None) -> int:
        key = (scope, id(nodes))
        if key not in self._same:
            layout: Layout = PerNode(nodes) if scope == "rank" else ReplicatedLayout(nodes)
            if scope == "host":
                lowest: dict[int, int] = {}
                for node in nodes:
                    lowest.setdefault(hosts[node] if hosts else 0, node)
                layout = PerNode(tuple(sorted(lowest.values())))
            self._same[key] = self.number(layout)
        return self._same[key]


def with_references(
    manifest: Manifest, earlier: Manifest, names: Collection[str], *, for_all: bool = False
) -> Manifest:
    """The manifest with the leaves `names` as `earlier` has them, planned with `referenced=names`.

    Whole leaves are referenced, also those that `earlier` itself references, with the shard rows that hold
    them. An alias needs its target among the names or in the manifest. `for_all`: leaves that all nodes of
    `earlier` share belong to all nodes of the new manifest.
    """
    rows = sorted(row for name in names for row in earlier.rows[name])
    return _Merging(manifest, earlier, rows, for_all=for_all).merged()


class _Merging:
    """Renumbers rows of an earlier manifest for a new one."""

    def __init__(self, manifest: Manifest, earlier: Manifest, rows: list[int], *, for_all: bool) -> None:
        self.for_all = for_all
        self.new = manifest
        self.old = earlier
        self.rows = {row: len(manifest.leaves) + index for index, row in enumerate(rows)}
        self.tries = {name: number for number, name in enumerate(manifest.tries)}
        self.nodes = {name: number for number, name in enumerate(manifest.world.names)}
        layouts = sorted({earlier.leaves[row].layout for row in rows})
        self.layouts = {old: len(manifest.layouts) + index for index, old in enumerate(layouts)}

    def merged(self) -> Manifest:
        leaves = [
            leaf._replace(source=self._try(leaf.source), layout=self.layouts[leaf.layout])
            for leaf in map(self.old.leaves.__getitem__, self.rows)
        ]
        layouts = [self._layout(self.old.layouts[number]) for number in self.layouts]
        shards = [
            shard._replace(source=self._try(shard.source), node=self._node(shard.node))
            for shard in self._needed()
        ]
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

    def _layout(self, layout: Layout) -> Layout:
        nodes = tuple(self._node(node) for node in layout.nodes)
        if isinstance(layout, PerNode):
            return PerNode(nodes)
        if isinstance(layout, Mesh):
            return replace(layout, nodes=nodes)
        more: tuple[int, ...] = ()  # new nodes that share what all had before; they hold no bytes of it
        if self.for_all and set(range(len(self.old.world.nodes))) <= set(layout.nodes):
            more = tuple(node for node in range(len(self.new.world.nodes)) if node not in nodes)
        if isinstance(layout, ReplicatedLayout):
            return ReplicatedLayout(nodes + more)
        # A cut inside a removed leaf moves to the next leaf that is kept.
        kept = [item for item, row in enumerate(layout.items) if row in self.rows]
        before = {item: index for index, item in enumerate(kept)}
        for item in range(len(layout.items), -1, -1):
            before.setdefault(item, before.get(item + 1, len(kept)))
        cuts = tuple(Cut(before[c.item], c.element if c.item in kept else 0) for c in layout.cuts)
        items = tuple(self.rows[layout.items[item]] for item in kept)
        return Split(nodes + more, items, cuts + cuts[-1:] * len(more))

    def _needed(self) -> Iterator[ShardRow]:
        """The renumbered files that hold the leaves."""
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

    def _try(self, number: int) -> int:
        return self.tries.setdefault(self.old.tries[number], len(self.tries))

    def _node(self, number: int) -> int:
        return self.nodes.setdefault(self.old.world.names[number], len(self.nodes))
