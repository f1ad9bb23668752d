"""List what an epoch holds, and read the verified bytes of its tensors. Needs no torch or numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from torchrelay.checkpoint.format.dtypes import SIZE
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest, PerNode, parts_of
from torchrelay.checkpoint.format.mesh_geometry import Bounds, Interval, range_boxes, runs, volume, whole
from torchrelay.checkpoint.format.names import Box, Flat, format_key, nearest
from torchrelay.checkpoint.format.position import CommittedPosition, matches
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import ReadRequest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.verify import seen_twice, verify_epoch
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UsageError
from torchrelay.records import Json, dataclass


@dataclass(frozen=True)
class NodeLeaf:
    """A leaf, named `trainer_1:total` if nodes differ, of the node `owner`; None if all nodes share it."""

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
        """Whether it has bytes: a tensor that is not an alias."""
        return self.leaf.kind == "tensor" and self.leaf.alias_of is None


@dataclass(frozen=True)
class Epoch:
    """An open epoch; `groups` are those whose files still exist, empty for all."""

    reader: LeafReader
    groups: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.reader.manifest

    @cached_property
    def items(self) -> dict[str, NodeLeaf]:
        """All items by name, in the order of the manifest."""
        manifest, names, found = self.manifest, self.manifest.world.names, []
        for row, leaf in enumerate(manifest.leaves):
            layout = manifest.layouts[leaf.layout]
            if isinstance(layout, PerNode):
                found += [NodeLeaf(f"{names[one]}:{leaf.name}", row, leaf, one) for one in layout.nodes]
            elif len(manifest.rows[leaf.name]) > 1:
                found.append(NodeLeaf(f"{names[layout.nodes[0]]}:{leaf.name}", row, leaf))
            else:
                found.append(NodeLeaf(leaf.name, row, leaf))
        return {item.name: item for item in found}

    def gone(self, item: NodeLeaf) -> bool:
        """Whether retention has deleted the files of its group."""
        return item.leaf.group in self._removed

    @cached_property
    def _removed(self) -> frozenset[str]:
        return self.manifest.removed(self.groups)

    def chosen(self, patterns: Sequence[str]) -> dict[str, NodeLeaf]:
        """The items that match a pattern, by leaf or with the node in front; all without patterns."""
        if not patterns:
            return self.items
        return {
            name: item
            for name, item in self.items.items()
            if any(matches(item.leaf.name, one) or matches(name, one) for one in patterns)
        }

    def value(self, item: NodeLeaf) -> Json:
        """A value in its typed form; raises DamagedError or StorageError."""
        if item.row in self.manifest.values:
            return self.manifest.values[item.row]
        node = item.owner
        if node is None:
            node = next(parts_of(self.manifest.layouts[item.leaf.layout], item.row, item.leaf))[0]
        holder = (item.leaf.source, node, item.leaf.group)
        return seen_twice(lambda: self.reader.shards.open(holder)).values[item.leaf.name]


def open_epoch(storage: Storage, entry: CommittedPosition) -> Epoch:
    """Verify record and manifest; files are verified when needed. Raises DamagedError or StorageError."""
    manifest, shards = verify_epoch(storage, entry, want=()).check()
    return Epoch(LeafReader(storage, manifest, shards), tuple(entry.groups))


def check_chosen(epochs: Sequence[Epoch], patterns: Sequence[str]) -> None:
    """Raise UsageError for a pattern that matches nothing in any of the epochs."""
    for pattern in patterns:
        if not any(epoch.chosen([pattern]) for epoch in epochs):
            items = [item for epoch in epochs for item in epoch.items.values()]
            known = {item.name for item in items} | {item.leaf.blob for item in items}
            raise UsageError(f"no blob or leaf matches {pattern!r}{nearest(pattern, known)}")


CHUNK_BYTES = 8 << 20
"""Bytes of a part that are read at a time."""
SMALL_BYTES = 32 << 10
"""Parts up to this size are read together with others."""


@dataclass(frozen=True)
class LeafPart:
    """A stored part of a leaf of `shape`: one entry of one file.

    `run` are the elements of the leaf that it holds, if contiguous in row-major order; otherwise `box` is its
    box.
    """

    header: ShardHeader
    key: str
    shape: tuple[int, ...]
    item_bytes: int
    run: Interval | None
    box: Bounds | None

    @property
    def digests(self) -> bytes:
        """One digest per block."""
        return self.header.entries[self.key].digests

    def digest(self, block: int) -> bytes:
        """That of one block."""
        return self.digests[block * SIZE : (block + 1) * SIZE]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.header.entries[self.key].nbytes

    @property
    def elements(self) -> int:
        """Elements stored."""
        return self.nbytes // self.item_bytes

    @property
    def boxes(self) -> Iterator[tuple[Bounds, int]]:
        """The boxes of the leaf that it consists of, in stored order, each with its first element."""
        found = [self.box] if self.box is not None else range_boxes(self.shape, *(self.run or (0, 0)))
        first = 0
        for box in found:
            yield box, first
            first += volume(box)

    def index_of(self, element: int) -> int:
        """The index of an element of the part in the row-major order of the leaf."""
        if self.run is not None:
            return self.run[0] + element
        place, extents = 0, [stop - start for start, stop in self.box or ()]
        coordinate = []
        for extent in reversed(extents):
            element, at = divmod(element, extent)
            coordinate.append(at)
        for at, (start, _), size in zip(reversed(coordinate), self.box or (), self.shape, strict=True):
            place = place * size + start + at
        return place


def parts(epoch: Epoch, item: NodeLeaf) -> list[LeafPart]:
    """The stored parts of a tensor; opens and verifies the headers of their files.

    Raises DamagedError or StorageError.
    """
    leaf, everything = item.leaf, whole(item.leaf.shape)
    layout = epoch.manifest.layouts[leaf.layout]
    found = []
    for node, key in parts_of(layout, item.row, leaf):
        if item.owner in (None, node):
            box: Bounds | None = None
            if isinstance(key, Flat):
                run: Interval | None = (key.start, key.stop)
            else:
                box = key.intervals if isinstance(key, Box) else everything
                first, *more = [*itertools.islice(runs(everything, box), 2)] or [(0, 0)]
                run, box = (None, box) if more else (first, None)
            text = format_key(key)
            header = epoch.reader.header(leaf, node, text)
            found.append(LeafPart(header, text, leaf.shape, leaf.item_bytes, run, box))
    return found


class PartReader:
    """Bytes of an epoch: small parts are read together in advance, others on demand into one memory."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._memory = bytearray()
        self._held: dict[tuple[str, str], memoryview] = {}

    def fetch(self, wanted: Iterable[LeafPart]) -> None:
        """Read small parts completely, neighbours with one read; releases earlier ones."""
        self._held = {}
        files: dict[str, tuple[ShardHeader, list[ReadRequest]]] = {}
        for part in wanted:
            if 0 < part.nbytes <= SMALL_BYTES and (part.header.path, part.key) not in self._held:
                view = self._held[part.header.path, part.key] = memoryview(bytearray(part.nbytes))
                requests = files.setdefault(part.header.path, (part.header, []))[1]
                requests.append(ReadRequest(part.key, 0, part.nbytes, view))
        for header, requests in files.values():
            self.epoch.reader.read_stored(header, requests)

    def filled(self, part: LeafPart, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a part, valid until the next call; raises DamagedError or StorageError."""
        if (held := self._held.get((part.header.path, part.key))) is not None:
            return held[start:stop]
        if len(self._memory) < stop - start:
            self._memory = bytearray(stop - start)
        view = memoryview(self._memory)[: stop - start]
        if view:
            self.epoch.reader.read_stored(part.header, [ReadRequest(part.key, start, stop, view)])
        return view


_FLOATS = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_WHOLE = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool")
CAN_BE_BAD = frozenset((*_FLOATS, *_FLOAT8))
"""Types with a NaN; all of them except most of the float8 types have an Inf too."""
HAVE_NUMBERS = CAN_BE_BAD | frozenset(_WHOLE)
"""All others (less than a byte, `bits*`, `float4_e2m1fn_x2`) are compared by their bytes only."""
