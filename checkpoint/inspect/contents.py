"""List what an epoch holds, read the verified bytes of its tensors, and compare two epochs, without torch.

The epochs may have stored a leaf in other parts: cut at other places, in other boxes. Digests decide first:
equal blocks at the same places are not read. Elements are compared in logical order, for any number of
writers and any mesh. Memory stays below 64 MiB. Only statistics of changes need numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest, PerNode, parts_of
from torchrelay.checkpoint.format.mesh_geometry import (
    Bounds,
    Interval,
    intersect,
    range_boxes,
    runs,
    volume,
    whole,
)
from torchrelay.checkpoint.format.names import Box, Flat, format_key, nearest
from torchrelay.checkpoint.format.position import CommittedPosition, matches
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import ReadRequest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.verify import seen_twice, verify_epoch
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UsageError
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspect.statistics import Change


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
    """An entry of a file: the elements `run` of a leaf of `shape` in row-major order, or else its `box`."""

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
    def boxes(self) -> list[tuple[Bounds, int]]:
        """The boxes of the leaf that it consists of, in stored order, each with its first element."""
        found = [self.box] if self.box is not None else [*range_boxes(self.shape, *(self.run or (0, 0)))]
        return list(zip(found, itertools.accumulate(map(volume, found), initial=0), strict=False))

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


@dataclass(frozen=True)
class Suspect:
    """Elements of a strip without equal digests; `differs` if the digests of each block differ."""

    start: int
    stop: int
    differs: bool


@dataclass(frozen=True)
class Strip:
    """Elements from `a_at` on of part `a` are those from `b_at` on of part `b`; `count` of them."""

    a: LeafPart
    b: LeafPart
    a_at: int
    b_at: int
    count: int

    def unequal(self) -> list[Suspect]:
        """Elements, relative to the start, that digests of blocks at equal places do not show to be equal."""
        width = self.a.item_bytes
        start, shift = self.a_at * width, (self.b_at - self.a_at) * width
        stop = start + self.count * width
        if shift % BLOCK:
            return self.everything
        found: list[Suspect] = []
        for first in range(start // BLOCK * BLOCK, stop, BLOCK):
            equal = self._equal(first, shift, start, stop)
            if equal is True:
                continue
            low, high = (max(first, start) - start) // width, (min(first + BLOCK, stop) - start) // width
            if found and found[-1].stop == low and found[-1].differs == (equal is False):
                low = found.pop().start
            found.append(Suspect(low, high, differs=equal is False))
        return found

    @property
    def everything(self) -> list[Suspect]:
        """All elements of the strip."""
        return [Suspect(0, self.count, differs=False)] if self.count else []

    def _equal(self, first: int, shift: int, start: int, stop: int) -> bool | None:
        """Whether the block at byte `first` of part a equals the one there in b; None: unknown."""
        end = min(first + BLOCK, self.a.nbytes)
        other = first + shift
        if first < start or end > stop or other < 0 or min(other + BLOCK, self.b.nbytes) != end + shift:
            return None
        return self.a.digest(first // BLOCK) == self.b.digest(other // BLOCK)


@dataclass(frozen=True)
class Region:
    """A box of the leaf in different orders in two parts, within boxes that begin at these elements."""

    a: LeafPart
    b: LeafPart
    a_source: Bounds
    b_source: Bounds
    a_first: int
    b_first: int
    box: Bounds


def matched(a: Sequence[LeafPart], b: Sequence[LeafPart]) -> Iterator[Strip | Region]:
    """All elements of a leaf, each once, as stored in the parts of both epochs."""
    boxes = {part.box: part for part in b if part.box is not None}
    same = [(part, boxes[part.box]) for part in a if part.box is not None and part.box in boxes]
    for one, other in same:
        yield Strip(one, other, 0, 0, one.elements)
    done = {part.box for part, _ in same}
    a = [part for part in a if part.box is None or part.box not in done]
    b = [part for part in b if part.box is None or part.box not in done]
    if all(part.run is not None for part in (*a, *b)):
        left, right = (sorted(side, key=lambda part: part.run or (0, 0)) for side in (a, b))
        i = j = 0
        while i < len(left) and j < len(right):  # from one cut to the next
            one, other = left[i], right[j]
            (first, last), (begin, end) = one.run or (0, 0), other.run or (0, 0)
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield Strip(one, other, low - first, low - begin, high - low)
            i, j = i + (last <= end), j + (end <= last)
        return
    for one, other in itertools.product(a, b):
        for (a_source, a_first), (b_source, b_first) in itertools.product(one.boxes, other.boxes):
            if (box := intersect(a_source, b_source)) is not None:
                yield Region(one, other, a_source, b_source, a_first, b_first, box)


_TOGETHER = 256
"""Number of leaves that are compared by digests before the small ones of them are read."""
Kind = Literal["same", "added", "removed", "form", "value", "content", "gone"]


@dataclass(frozen=True)
class DiffOptions:
    """Whether to read blocks for `figures` where digests decide, and those of changed leaves `whole`."""

    patterns: tuple[str, ...] = ()
    figures: bool = True
    whole: bool = False


WITH_FIGURES = DiffOptions()


@dataclass(frozen=True)
class LeafChange:
    """Change of one leaf; `kind` is `gone` if retention has deleted the files of one side.

    `before` and `after` are forms (`float32[3]`), of a value its typed JSON, None if missing. `change` has
    the statistics of the compared blocks; `elements` is the size of the whole leaf.
    """

    name: str
    blob: str
    kind: Kind
    before: Json = None
    after: Json = None
    elements: int = 0
    change: Change | None = None


def leaf_changes(a: Epoch, b: Epoch, wish: DiffOptions = WITH_FIGURES) -> Iterator[LeafChange]:
    """Changes in the order of the second epoch; leaves that only the first has come last."""
    check_chosen([a, b], wish.patterns)
    before, after = a.chosen(wish.patterns), b.chosen(wish.patterns)
    sources = PartReader(a), PartReader(b)
    items = iter(after.items())
    while group := list(itertools.islice(items, _TOGETHER)):  # small ones that differ are read with few reads
        known = [
            _known(*sources, before[name], item)
            if name in before
            else LeafChange(name, item.leaf.blob, "added", None, item.form, item.leaf.elements)
            for name, item in group
        ]
        pairs = [pair for one in known if isinstance(one, Comparison) and wish.figures for pair in one.small]
        sources[0].fetch(pair.a for pair in pairs)
        sources[1].fetch(pair.b for pair in pairs)
        yield from (_compared(one, wish) if isinstance(one, Comparison) else one for one in known)
    for name, item in before.items():
        if name not in after:
            yield LeafChange(name, item.leaf.blob, "removed", item.form, None, item.leaf.elements)


def _known(left: PartReader, right: PartReader, one: NodeLeaf, other: NodeLeaf) -> LeafChange | Comparison:
    """The change, if known without reading a tensor, else the comparison to make."""
    a, b = left.epoch, right.epoch
    name, blob, size = other.name, other.leaf.blob, other.leaf.elements
    forms = (one.form, other.form)
    if forms[0] != forms[1]:
        return LeafChange(name, blob, "form", *forms, size)
    if other.leaf.alias_of is not None:
        return LeafChange(name, blob, "same", *forms)
    if a.gone(one) or b.gone(other):
        return LeafChange(name, blob, "gone", *forms, size)
    if not other.tensor:
        values = a.value(one), b.value(other)
        return LeafChange(name, blob, "same" if values[0] == values[1] else "value", *values, 1)
    comparison = Comparison(left, right, one, other)
    return LeafChange(name, blob, "same", *forms, size) if comparison.alike else comparison


def _compared(comparison: Comparison, wish: DiffOptions) -> LeafChange:
    item, change = comparison.item, None
    if wish.figures and item.leaf.dtype in HAVE_NUMBERS:
        change = comparison.change(whole=wish.whole)
        differs = change.changed > 0
    else:
        differs = comparison.differs()
    kind: Kind = "content" if differs else "same"
    forms = (item.form, item.form, item.leaf.elements)
    return LeafChange(item.name, item.leaf.blob, kind, *forms, change if differs else None)


class Comparison:
    """A tensor in two epochs, of the same type and shape."""

    def __init__(self, a: PartReader, b: PartReader, one: NodeLeaf, other: NodeLeaf) -> None:
        self._a, self._b = a, b
        self.item = other
        left, right = parts(a.epoch, one), parts(b.epoch, other)
        alike = [(part.key, part.digests) for part in left] == [(part.key, part.digests) for part in right]
        self._pairs: Sequence[Strip | Region] = () if alike else list(matched(left, right))
        self.alike = alike
        """Whether both have the same digests of the same parts, and are therefore equal."""

    @property
    def small(self) -> list[Strip]:
        """Strips of small parts with numbers that digests do not show to be equal."""
        if self.item.leaf.dtype not in HAVE_NUMBERS:
            return []
        strips = (pair for pair in self._pairs if isinstance(pair, Strip))
        return [one for one in strips if max(one.a.nbytes, one.b.nbytes) <= SMALL_BYTES and one.unequal()]

    def differs(self) -> bool:
        """Whether a bit differs; reads only if no digest decides."""
        strips = (pair for pair in self._pairs if isinstance(pair, Strip))
        if any(one.differs for strip in strips for one in strip.unequal()):
            return True
        return any(bytearray(a) != b for a, b in self._chunks(whole=False))

    def change(self, *, whole: bool) -> Change:
        """Statistics of the blocks that digests do not show to be equal, or of all if any bit differs."""
        from torchrelay.checkpoint.inspect.statistics import change_between, joined_changes

        chunks = self._chunks(whole=whole and self.differs())
        width, dtype = self.item.leaf.item_bytes, str(self.item.leaf.dtype)
        return joined_changes(change_between(a, b, width, dtype) for a, b in chunks)

    def _chunks(self, *, whole: bool) -> Iterator[tuple[memoryview, memoryview]]:
        """The same elements of both, as bytes; valid until the next ones are requested."""
        for of in self._pairs:
            if isinstance(of, Region):
                from torchrelay.checkpoint.inspect.statistics import gathered, small_boxes

                for box in small_boxes(of.a, of.a_source, of.a_first, of.box):
                    a = gathered(self._a, of.a, of.a_source, of.a_first, box)
                    yield a, gathered(self._b, of.b, of.b_source, of.b_first, box)
                continue
            width = of.a.item_bytes
            for suspect in of.everything if whole else of.unequal():
                for low in range(suspect.start, suspect.stop, CHUNK_BYTES // width):
                    high = min(suspect.stop, low + CHUNK_BYTES // width)
                    at, there = (of.a_at + low) * width, (of.b_at + low) * width
                    length = (high - low) * width
                    a = self._a.filled(of.a, at, at + length)
                    yield a, self._b.filled(of.b, there, there + length)
