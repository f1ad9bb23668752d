"""Compare two epochs: which leaves changed, and by how much.

The epochs may have stored a leaf in other parts: cut at other places, in other boxes. Digests decide first:
equal blocks at the same places are not read. Elements are compared in logical order, for any number of
writers and any mesh. Memory stays below 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Literal

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.mesh_geometry import Bounds, intersect
from torchrelay.checkpoint.inspect.contents import (
    CHUNK_BYTES,
    HAVE_NUMBERS,
    SMALL_BYTES,
    Epoch,
    LeafPart,
    NodeLeaf,
    PartReader,
    check_chosen,
    parts,
)
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspect.statistics import Change


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
    for one, other in product(a, b):
        for (a_source, a_first), (b_source, b_first) in product(one.boxes, other.boxes):
            if (box := intersect(a_source, b_source)) is not None:
                yield Region(one, other, a_source, b_source, a_first, b_first, box)


_TOGETHER = 256
"""Number of leaves that are compared by digests before the small ones of them are read."""
Kind = Literal["same", "added", "removed", "form", "value", "content", "gone"]


@dataclass(frozen=True)
class DiffOptions:
    """Precision of a comparison.

    Without `figures` nothing is read if digests decide. With `whole` all blocks of a changed leaf are read,
    so that its norms and cosine are those of the leaf, not of its changed blocks.
    """

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
    """Changes in the order of the second epoch; leaves that only the first has come last.

    Raises UsageError for a pattern that matches nothing in either, or if numpy is needed and missing;
    DamagedError or StorageError, naming file, leaf and block.
    """
    check_chosen([a, b], wish.patterns)
    before, after = a.chosen(wish.patterns), b.chosen(wish.patterns)
    sources = PartReader(a), PartReader(b)
    items = iter(after.items())
    while group := list(islice(items, _TOGETHER)):  # small ones that differ are read with few reads
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
        for pair in self._pairs:
            yield from self._of_strip(pair, whole) if isinstance(pair, Strip) else self._of_region(pair)

    def _of_strip(self, strip: Strip, whole: bool) -> Iterator[tuple[memoryview, memoryview]]:
        width = strip.a.item_bytes
        for suspect in strip.everything if whole else strip.unequal():
            for low in range(suspect.start, suspect.stop, CHUNK_BYTES // width):
                high = min(suspect.stop, low + CHUNK_BYTES // width)
                at, there = (strip.a_at + low) * width, (strip.b_at + low) * width
                length = (high - low) * width
                a = self._a.filled(strip.a, at, at + length)
                yield a, self._b.filled(strip.b, there, there + length)

    def _of_region(self, of: Region) -> Iterator[tuple[memoryview, memoryview]]:
        from torchrelay.checkpoint.inspect.statistics import gathered, small_boxes

        for box in small_boxes(of.a, of.a_source, of.a_first, of.box):
            a = gathered(self._a, of.a, of.a_source, of.a_first, box)
            yield a, gathered(self._b, of.b, of.b_source, of.b_first, box)
