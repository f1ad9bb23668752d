"""What an epoch holds, one item per content of its own: leaves that all share, and each node's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format.layouts import PerNode
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.keys import parts_of
from torchrelay.checkpoint.format.manifest.position import matches
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.verify import prove, seen_twice
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Json = Any


@dataclass(frozen=True)
class Item:
    """A leaf as `owner`, the number of a node, has it; None where all nodes share it.

    `name` is the leaf's, or `trainer_1:total` for what differs between nodes.
    """

    name: str
    row: int
    leaf: LeafRow
    owner: int | None = None

    @property
    def form(self) -> str:
        """`float32[3,4]`, `value`, or `alias of model.weight`."""
        if self.leaf.alias_of is not None:
            return f"alias of {self.leaf.alias_of}"
        return f"{self.leaf.dtype}[{','.join(map(str, self.leaf.shape))}]" if self.tensor else "value"

    @property
    def tensor(self) -> bool:
        """Whether it has bytes of its own: a tensor that is no alias."""
        return self.leaf.kind == "tensor" and self.leaf.alias_of is None


@dataclass(frozen=True)
class Epoch:
    """An epoch that is looked at; `groups` are those whose files still exist, empty for all."""

    reader: LeafReader
    groups: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""
        return self.reader.manifest

    @cached_property
    def items(self) -> dict[str, Item]:
        """All items by name, in the order of the manifest."""
        return {item.name: item for item in _items(self.manifest)}

    def gone(self, item: Item) -> bool:
        """Whether retention has removed the files of its group."""
        return item.leaf.group in self._removed

    @cached_property
    def _removed(self) -> frozenset[str]:
        return self.manifest.removed(self.groups)

    def chosen(self, patterns: Sequence[str]) -> dict[str, Item]:
        """The items that match any pattern, or all without patterns; perhaps none."""
        if not patterns:
            return self.items
        return {name: item for name, item in self.items.items() if chosen_by(item, patterns)}

    def value(self, item: Item) -> Json:
        """A value in its typed form; raises DamagedError or StorageError for what the storage has."""
        if item.row in self.manifest.values:
            return self.manifest.values[item.row]
        node = item.owner
        if node is None:
            node = next(parts_of(self.manifest.layouts[item.leaf.layout], item.row, item.leaf))[0]
        holder = (item.leaf.source, node, item.leaf.group)
        return seen_twice(lambda: self.reader.shards.open(holder)).values[item.leaf.name]


def open_epoch(storage: Storage, entry: Entry) -> Epoch:
    """Prove record and manifest; files are proved when they are needed.

    Raises DamagedError or StorageError.
    """
    manifest, shards = prove(storage, entry, want=()).check()
    return Epoch(LeafReader(storage, manifest, shards), tuple(entry.groups))


def chosen_by(item: Item, patterns: Sequence[str]) -> bool:
    """Whether any pattern means the item, by its leaf's name or with the node in front."""
    return any(matches(item.leaf.name, one) or matches(item.name, one) for one in patterns)


def check_chosen(epochs: Sequence[Epoch], patterns: Sequence[str]) -> None:
    """Raise UsageError for a pattern that means nothing in any of the epochs."""
    for pattern in patterns:
        if not any(epoch.chosen([pattern]) for epoch in epochs):
            items = [item for epoch in epochs for item in epoch.items.values()]
            known = {item.name for item in items} | {item.leaf.blob for item in items}
            raise UsageError(f"no blob or leaf matches {pattern!r}{nearest(pattern, known)}")


def _items(manifest: Manifest) -> Iterator[Item]:
    names = manifest.world.names
    for row, leaf in enumerate(manifest.leaves):
        layout = manifest.layouts[leaf.layout]
        if isinstance(layout, PerNode):
            for node in layout.nodes:
                yield Item(f"{names[node]}:{leaf.name}", row, leaf, node)
        elif len(manifest.rows[leaf.name]) > 1:
            yield Item(f"{names[layout.nodes[0]]}:{leaf.name}", row, leaf)
        else:
            yield Item(leaf.name, row, leaf)
