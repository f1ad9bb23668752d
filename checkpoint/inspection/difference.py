"""What changed between two epochs: which leaves, and by how much.

Digests decide first: where the blocks of both line up, equal ones are not read. Elements are compared in
logical order, however many nodes wrote them and on whatever mesh. Memory stays below 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.checkpoint.inspection.contents import Epoch, Item, check_chosen
from torchrelay.checkpoint.inspection.number_types import HAVE_NUMBERS
from torchrelay.checkpoint.inspection.strips import Region, Strip, matched
from torchrelay.checkpoint.inspection.tensor_bytes import CHUNK_BYTES, SMALL_BYTES, Source, parts
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspection.change import Change

Json = Any
_TOGETHER = 256
"""So many leaves are looked at before the small ones of them are read."""
Kind = Literal["same", "added", "removed", "form", "value", "content", "gone"]


@dataclass(frozen=True)
class Wish:
    """How closely to look.

    Without `figures` nothing is read where digests tell. With `whole` all blocks of a changed leaf are
    read, so that its norms and cosine are those of the leaf, not of its changed blocks.
    """

    patterns: tuple[str, ...] = ()
    figures: bool = True
    whole: bool = False


WITH_FIGURES = Wish()


@dataclass(frozen=True)
class LeafChange:
    """What became of one leaf; `kind` is `gone` where retention has removed the files of one side.

    `before` and `after` are forms (`float32[3]`), of a value its typed JSON, None for what is not there.
    `change` has the figures of the blocks that were compared; `elements` is the size of all of the leaf.
    """

    name: str
    blob: str
    kind: Kind
    before: Json = None
    after: Json = None
    elements: int = 0
    change: Change | None = None


def leaf_changes(a: Epoch, b: Epoch, wish: Wish = WITH_FIGURES) -> Iterator[LeafChange]:
    """One after another in the order of the second epoch, those that only the first has at the end.

    Raises UsageError for a pattern that means nothing in either, or where numpy is needed and missing;
    DamagedError or StorageError, naming file, leaf and block, for what the storages have.
    """
    check_chosen([a, b], wish.patterns)
    before, after = a.chosen(wish.patterns), b.chosen(wish.patterns)
    sources = Source(a), Source(b)
    items = iter(after.items())
    while group := list(islice(items, _TOGETHER)):
        yield from _compared_together(sources, before, group, wish)
    for name, item in before.items():
        if name not in after:
            yield LeafChange(name, item.leaf.blob, "removed", item.form, None, item.leaf.elements)


def _compared_together(
    sources: tuple[Source, Source],
    before: Mapping[str, Item],
    group: Sequence[tuple[str, Item]],
    wish: Wish,
) -> Iterator[LeafChange]:
    """Some leaves, of which the small ones that differ are read with few reads."""
    known = [
        _known(*sources, before[name], item)
        if name in before
        else LeafChange(name, item.leaf.blob, "added", None, item.form, item.leaf.elements)
        for name, item in group
    ]
    pairs = [pair for one in known if isinstance(one, Comparison) and wish.figures for pair in one.small]
    sources[0].fetch(pair.a for pair in pairs)
    sources[1].fetch(pair.b for pair in pairs)
    yield from (_looked_into(one, wish) if isinstance(one, Comparison) else one for one in known)


def _known(left: Source, right: Source, one: Item, other: Item) -> LeafChange | Comparison:
    """What can be told without reading a tensor, else what is to be compared."""
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


def _looked_into(comparison: Comparison, wish: Wish) -> LeafChange:
    item = comparison.item
    told = (item.form, item.form, item.leaf.elements)
    if wish.figures and item.leaf.dtype in HAVE_NUMBERS:
        change = comparison.change(whole=wish.whole)
        if change.changed:
            return LeafChange(item.name, item.leaf.blob, "content", *told, change)
        return LeafChange(item.name, item.leaf.blob, "same", *told)
    kind: Kind = "content" if comparison.differs() else "same"
    return LeafChange(item.name, item.leaf.blob, kind, *told)


class Comparison:
    """A tensor in two epochs, of the same type and shape."""

    def __init__(self, a: Source, b: Source, one: Item, other: Item) -> None:
        self._a, self._b = a, b
        self.item = other
        left, right = parts(a.epoch, one), parts(b.epoch, other)
        alike = [(part.key, part.digests) for part in left] == [(part.key, part.digests) for part in right]
        self._pairs: Sequence[Strip | Region] = () if alike else list(matched(left, right))
        self.alike = alike
        """Whether both have the same digests of the same parts: then they are the same."""

    @property
    def small(self) -> list[Strip]:
        """Strips of small parts with numbers that digests do not call equal."""
        if self.item.leaf.dtype not in HAVE_NUMBERS:
            return []
        strips = (pair for pair in self._pairs if isinstance(pair, Strip))
        return [one for one in strips if max(one.a.nbytes, one.b.nbytes) <= SMALL_BYTES and one.unequal()]

    def differs(self) -> bool:
        """Whether a bit differs; reads only where no digest tells."""
        suspects = [
            one for pair in self._pairs if isinstance(pair, Strip) for one in pair.unequal() if one.differs
        ]
        return bool(suspects) or any(bytearray(a) != b for a, b in self._chunks(whole=False))

    def change(self, *, whole: bool) -> Change:
        """The figures, of the blocks that digests do not call equal or of all if any bit differs."""
        from torchrelay.checkpoint.inspection.change import change_between, joined

        whole = whole and self.differs()
        chunks = self._chunks(whole=whole)
        dtype = str(self.item.leaf.dtype)
        return joined(change_between(a, b, self._width, dtype) for a, b in chunks)

    @property
    def _width(self) -> int:
        return self._pairs[0].a.item_bytes

    def _chunks(self, *, whole: bool) -> Iterator[tuple[memoryview, memoryview]]:
        """The same elements of both, as bytes; good until the next ones are asked for."""
        for pair in self._pairs:
            yield from self._of_strip(pair, whole) if isinstance(pair, Strip) else self._of_region(pair)

    def _of_strip(self, strip: Strip, whole: bool) -> Iterator[tuple[memoryview, memoryview]]:
        width = self._width
        for suspect in strip.everything if whole else strip.unequal():
            for low in range(suspect.start, suspect.stop, CHUNK_BYTES // width):
                high = min(suspect.stop, low + CHUNK_BYTES // width)
                at, there = strip.a_at + low, strip.b_at + low
                yield (
                    self._a.filled(strip.a, at * width, (at + high - low) * width),
                    self._b.filled(strip.b, there * width, (there + high - low) * width),
                )

    def _of_region(self, region: Region) -> Iterator[tuple[memoryview, memoryview]]:
        from torchrelay.checkpoint.inspection.gathering import gathered, small_boxes

        a, b = self._a, self._b
        for box in small_boxes(region.a, region.a_source, region.a_first, region.box):
            yield (
                gathered(a.epoch, region.a, region.a_source, region.a_first, box, a.buffer),
                gathered(b.epoch, region.b, region.b_source, region.b_first, box, b.buffer),
            )
