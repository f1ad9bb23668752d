"""Represent the entries of a shard as columns: those to be written, and those of a file.

With many small tensors every object and every Python call per entry costs time. So a part has no entry
objects: it has its keys, their forms, of which there are few, and their data. A file may have tens of
thousands of entries of which a load needs five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import itemgetter, mul, sub
from typing import Any, NamedTuple, TypeVar

from torchrelay.checkpoint.format import canonical_json, dtypes, names
from torchrelay.checkpoint.format import dtypes as digest
from torchrelay.checkpoint.format.dtypes import ElementType
from torchrelay.checkpoint.format.mesh_geometry import Bounds
from torchrelay.checkpoint.format.names import (
    Box,
    Flat,
    Key,
    Whole,
    all_plain,
    encode_name,
    format_key,
    format_keys,
)
from torchrelay.errors import BlobError, FormatError
from torchrelay.records import Json, dataclass

Data = Any
"""torch.Tensor, or Memory of 1-D bytes; the exact type would import torch."""
T = TypeVar("T")


class EntryForm(NamedTuple):
    """Common properties of entries of one element type and stored shape.

    `dtype` and `shape` are the logical ones of the piece, `text` is the part of the header before the
    offsets, `raw` whether elements are stored as plain bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: int
    itemsize: int
    text: str
    raw: bool


@lru_cache(maxsize=1 << 14)
def form_of(dtype: str, shape: tuple[int, ...]) -> EntryForm:
    """The form of whole leaves, or pieces, of this type and logical shape."""
    kind = dtypes.by_name(dtype)
    stored = ",".join(map(str, kind.stored_shape(shape)))
    text = f'{{"dtype":"{kind.code}","shape":[{stored}],"data_offsets":['
    nbytes = kind.nbytes(shape)
    return EntryForm(dtype, tuple(shape), nbytes, digest.block_count(nbytes), kind.itemsize, text, kind.raw)


_DIMENSIONS = 64
"""Number of cached forms: a file may claim millions."""


def form_said(dtype: str, shape: tuple[int, ...]) -> EntryForm:
    """The same for a shape from an unverified file."""
    return (form_of if len(shape) <= _DIMENSIONS else form_of.__wrapped__)(dtype, shape)


@dataclass(frozen=True)
class Entries:
    """Entries of a file, column by column: header keys, forms, and data.

    `pieces` has, by key, the metadata of those that the header alone does not describe. `in_memory`: all data
    are plain memory of exactly the right size.
    """

    keys: Sequence[str]
    forms: Sequence[EntryForm]
    data: Sequence[Data]
    pieces: Mapping[str, Json]
    in_memory: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes in the file, computed without the data."""
        return [form.nbytes for form in self.forms]

    def of(self, data: Sequence[Data]) -> Entries:
        """The same entries with these data, in equal number."""
        if len(data) != len(self):
            raise ValueError(f"{len(data)} tensors for {len(self)} entries")
        return replace(self, data=data)

    def among(self, numbers: Sequence[int]) -> Entries:
        """The entries with these numbers, in this order."""
        keys = picked(self.keys, numbers)
        pieces = {key: self.pieces[key] for key in keys if key in self.pieces} if self.pieces else {}
        data = picked(self.data, numbers)
        return Entries(keys, picked(self.forms, numbers), data, pieces, self.in_memory)

    def ordered(self) -> Entries:
        """In stored order: item size descending, so that every tensor is aligned, then key."""
        numbers = sorted(range(len(self)), key=self.keys.__getitem__)
        if len({form.itemsize for form in self.forms}) > 1:
            numbers.sort(key=lambda number: -self.forms[number].itemsize)
        return self.among(numbers)


def picked(items: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """The items with these numbers."""
    return itemgetter(*numbers)(items) if len(numbers) > 1 else tuple(items[number] for number in numbers)


def described(keys: Sequence[Key], types: Iterable[str], shapes: Sequence[tuple[int, ...]]) -> Entries:
    """The columns of tensors and pieces of leaves of these types and shapes, without data yet.

    Raises BlobError for a name that cannot be a key, or an empty piece.
    """
    texts = format_keys(keys)
    forms = list(map(form_of, types, map(piece_shape, keys, shapes)))
    odd = [form.raw or type(key) is not Whole for form, key in zip(forms, keys, strict=True)]
    pieces = {
        text: _piece(form, shape)
        for text, form, shape in compress(zip(texts, forms, shapes, strict=True), odd)
    }
    return Entries(texts, forms, (), pieces)


def whole_entries(
    names: Sequence[str], forms: Sequence[EntryForm], data: Sequence[Data], *, in_memory: bool = False
) -> Entries:
    """The columns of leaves that are stored whole; raises BlobError for a name that cannot be a key."""
    keys = names if all_plain(names) else list(map(encode_name, names))
    raw = compress(zip(keys, forms, strict=True), [form.raw for form in forms])
    return Entries(keys, forms, data, {key: _piece(form, form.shape) for key, form in raw}, in_memory)


def _piece(form: EntryForm, shape: tuple[int, ...]) -> dict[str, Json]:
    return {**({"dtype": form.dtype} if form.raw else {}), "shape": list(shape)}


def piece_shape(key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the piece `key` of a leaf of `shape`; raises BlobError if it does not fit."""
    if isinstance(key, Flat):
        if key.stop > _count(shape):
            raise BlobError(f"{format_key(key)} ends beyond the {_count(shape)} elements of its leaf")
        return (key.stop - key.start,)
    if isinstance(key, Box):
        extents = _extents(key.intervals, shape)
        if extents is None:
            raise BlobError(f"{format_key(key)} is not a box of a leaf of shape {list(shape)}")
        return extents
    return shape


@lru_cache(maxsize=1 << 10)
def _extents(box: Bounds, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The extents of a box; None if it is outside of the shape."""
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        return None
    return tuple(stop - start for start, stop in box)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


class StoredEntry(NamedTuple):
    """One tensor or piece in a file.

    `dtype` and `shape` are those of the whole leaf, `start` and `stop` bytes of the file, `digests` one
    xxh3-128 per block.
    """

    key: Key
    dtype: ElementType
    shape: tuple[int, ...]
    start: int
    stop: int
    digests: bytes

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.stop - self.start

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The logical shape of what is stored."""
        return piece_shape(self.key, self.shape)


@dataclass(frozen=True)
class EntryColumns:
    """Adjacent entries as stated by their file: `forms` are those of the stored bytes.

    Offsets are relative to the data; `blocks` are the numbers of the first blocks, and the total number.
    """

    forms: Sequence[EntryForm]
    starts: Sequence[int]
    stops: Sequence[int]
    blocks: Sequence[int]

    def bounds(self, numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Begin and end of these entries."""
        if isinstance(numbers, range) and numbers.step == 1:
            some = slice(numbers.start, numbers.stop)
            return self.starts[some], self.stops[some]
        return [self.starts[number] for number in numbers], [self.stops[number] for number in numbers]


def columns_of(said: Mapping[str, Json], data_bytes: int) -> EntryColumns | None:
    """The columns of a header's entries if all are valid, else None: the caller then finds the error.

    Checked are types, element types, shapes, and that the entries fill the data without a gap; keys are not.
    """
    try:
        entries = list(said.values())
        shapes = [entry["shape"] for entry in entries]
        bounds = [entry["data_offsets"] for entry in entries]
        codes = [entry["dtype"] for entry in entries]
        known = {code: dtypes.by_code(code) for code in set(codes)}
    except (KeyError, TypeError, IndexError, FormatError):
        return None
    if not _all_are(dict, entries) or not _all_are(list, shapes) or not _all_are(list, bounds):
        return None
    edges = list(chain.from_iterable(bounds))
    if not set(map(len, bounds)) <= {2} or not are_counts(edges) or not are_counts(_flat(shapes)):
        return None
    starts, stops = edges[0::2], edges[1::2]
    if [0, *stops] != [*starts, data_bytes] or data_bytes >= canonical_json.INTEGER_LIMIT:
        return None
    kinds, sizes = [known[code] for code in codes], list(map(sub, stops, starts))
    widths = [kind.itemsize for kind in kinds]
    if min(sizes, default=0) < 0 or list(map(mul, map(math.prod, shapes), widths)) != sizes:
        return None
    if 0 in sizes and any(too_large(shape) for shape, size in zip(shapes, sizes, strict=True) if not size):
        return None
    forms = list(map(form_said, [kind.name for kind in kinds], map(tuple, shapes)))
    return EntryColumns(forms, starts, stops, digest.first_blocks(sizes))


def too_large(shape: Sequence[int]) -> bool:
    """Whether a shape cannot be allocated: 2**62 beside 0 has no bytes, but breaks its users."""
    return math.prod(max(extent, 1) for extent in shape) >= canonical_json.INTEGER_LIMIT


def _all_are(kind: type, items: Sequence[object]) -> bool:
    return set(map(type, items)) <= {kind}


def are_counts(numbers: Sequence[int]) -> bool:
    """Whether all are whole numbers from 0."""
    return _all_are(int, numbers) and min(numbers, default=0) >= 0


def _flat(shapes: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(shapes))


@dataclass(frozen=True)
class StoredColumns:
    """The columns of a file with their digests; `data_start` is the offset of the data in the file."""

    columns: EntryColumns
    digests: bytes
    data_start: int

    def entry(self, number: int, key: Key, kind: ElementType, shape: tuple[int, ...]) -> StoredEntry:
        """The entry of this number, which is known to be `key`, of this logical type and shape."""
        columns = self.columns
        first, after = columns.blocks[number], columns.blocks[number + 1]
        digests = self.digests[first * digest.SIZE : after * digest.SIZE]
        start, stop = self.data_start + columns.starts[number], self.data_start + columns.stops[number]
        return StoredEntry(key, kind, shape, start, stop, digests)


_NOTHING = StoredColumns(EntryColumns((), (), (), (0,)), b"", 0)


Look = Callable[[int, str], StoredEntry]
"""Finds the entry of this number and key."""


class StoredEntries(Mapping[str, StoredEntry]):
    """The entries of a file by key, in its order.

    `numbers` has the number of each by its key, `known` those that were parsed one by one. `odd` ones have a
    special form, which `look` parses; it raises DamagedError for an invalid one. All others are in `stored`,
    as whole leaves under their own names.
    """

    def __init__(
        self,
        numbers: dict[str, int],
        known: dict[str, StoredEntry],
        stored: StoredColumns = _NOTHING,
        odd: Collection[str] = (),
        look: Look | None = None,
    ) -> None:
        self.stored = stored
        self._known = known
        self._odd = odd if look else ()
        self._look = look
        self._numbers = numbers
        self._asked: tuple[list[str], list[int]] = [], []

    def __getitem__(self, key: str) -> StoredEntry:
        found = self._known.get(key)
        if found is None:
            number = self._numbers[key]
            if self._look and key in self._odd:
                found = self._look(number, key)
            else:
                form = self.stored.columns.forms[number]
                found = self.stored.entry(number, names.Whole(key), dtypes.by_name(form.dtype), form.shape)
            self._known[key] = found
        return found

    def look_at_all(self) -> None:
        """Parse all odd entries in file order, before other threads use them.

        Raises DamagedError for the first invalid one.
        """
        for key in self._numbers if self._odd else ():
            if key in self._odd:
                self[key]
        self._odd, self._look = (), None

    def keys(self) -> KeysView[str]:
        """All keys, as a dictionary returns them."""
        return self._numbers.keys()

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def in_columns(self) -> bool:
        """Whether all entries are in columns; False if each was parsed alone."""
        return len(self.stored.columns.forms) == len(self._numbers)

    @property
    def all_plain(self) -> bool:
        """Whether each is known to be a whole leaf with its name as key."""
        return self.in_columns and not self._odd and not self._known

    def numbers(self, keys: Sequence[str]) -> Sequence[int]:
        """The numbers of entries in the columns of the file; raises KeyError."""
        keys = list(keys)
        if self._are_all(keys):
            return range(len(keys))
        asked, found = self._asked  # read once: another thread may replace it meanwhile
        if keys != asked:  # one load needs the same several times
            found = list(map(self._numbers.__getitem__, keys))
            self._asked = keys, found
        return found

    def key_at(self, number: int) -> str:
        """The key of one entry."""
        return self._order[number]

    def forms(self, keys: Sequence[str]) -> Sequence[EntryForm]:
        """The logical forms of leaves."""
        if self._known or self._odd:
            return list(map(self.form, keys))
        forms = self.stored.columns.forms
        return forms if self._are_all(keys) else list(map(forms.__getitem__, self.numbers(keys)))

    @cached_property
    def _order(self) -> list[str]:
        return list(self._numbers)

    def _are_all(self, keys: Sequence[str]) -> bool:
        """Whether these are all entries, in order: then nothing is looked up."""
        return len(keys) == len(self._numbers) and list(keys) == self._order

    def form(self, key: str) -> EntryForm:
        """The logical form of a leaf; makes no object, because callers ask for all."""
        found = self[key] if key in self._odd else self._known.get(key)
        if found is not None:
            return form_said(found.dtype.name, found.shape)
        return self.stored.columns.forms[self._numbers[key]]
