"""References: leaves that an earlier try keeps unchanged, so that nobody writes them again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torchrelay.checkpoint.format.layouts import Cut, Layout, PerNode, Replicated, Split
from torchrelay.checkpoint.format.manifest.keys import alike, holding
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest, ShardRow, in_order
from torchrelay.checkpoint.format.mesh import Mesh


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
