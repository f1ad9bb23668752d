"""Represent the entries of a shard as columns: those to be written, and those of a file.

With many small tensors every object and every Python call per entry costs time. So a part has no entry
objects: it has its keys, their forms, of which there are few, and their data. A file may have tens of
thousands of entries of which a load needs five.

Headers in exactly our writer's form are parsed as text, in a third of the time of decoding JSON:

    {"__metadata__":{...},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...}}

Splitting a text at a separator loses nothing. If everything between keys is what a writer would put there,
and keys need no JSON escapes, the result is exactly the written content. Any other text is decoded as JSON.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, compress, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.format.dtypes import SIZE, ElementType, block_count, first_blocks
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
    none_reserved,
)
from torchrelay.errors import BlobError, DamagedError, FormatError
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
    return EntryForm(dtype, tuple(shape), nbytes, block_count(nbytes), kind.itemsize, text, kind.raw)


_DIMENSIONS = 64
"""Number of cached forms: a file may claim millions."""


def form_said(dtype: str, shape: tuple[int, ...]) -> EntryForm:
    """The same for a shape from an unverified file."""
    return (form_of if len(shape) <= _DIMENSIONS else form_of.__wrapped__)(dtype, shape)


@dataclass(frozen=True)
class Entries:
    """Entries of a file, column by column: header keys, forms, and data.

    `pieces` has, by key, the metadata of those that the header alone does not describe. `kept`, if
    any, keeps all data alive, which are then plain memory of exactly the right size.
    """

    keys: Sequence[str]
    forms: Sequence[EntryForm]
    data: Sequence[Data]
    pieces: Mapping[str, Json]
    kept: object = None

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
        return Entries(keys, picked(self.forms, numbers), data, pieces, self.kept)

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
    """The columns of pieces of leaves, without data yet; raises BlobError for an invalid or empty piece."""
    texts = format_keys(keys)
    forms = list(map(form_of, types, map(piece_shape, keys, shapes)))
    odd = [form.raw or type(key) is not Whole for form, key in zip(forms, keys, strict=True)]
    pieces = {
        text: _piece(form, shape)
        for text, form, shape in compress(zip(texts, forms, shapes, strict=True), odd)
    }
    return Entries(texts, forms, (), pieces)


def whole_entries(
    names: Sequence[str], forms: Sequence[EntryForm], data: Sequence[Data], *, kept: object = None
) -> Entries:
    """The columns of leaves that are stored whole; raises BlobError for a name that cannot be a key."""
    keys = names if all_plain(names) else list(map(encode_name, names))
    raw = compress(zip(keys, forms, strict=True), [form.raw for form in forms])
    return Entries(keys, forms, data, {key: _piece(form, form.shape) for key, form in raw}, kept)


def _piece(form: EntryForm, shape: tuple[int, ...]) -> dict[str, Json]:
    return {**({"dtype": form.dtype} if form.raw else {}), "shape": list(shape)}


def piece_shape(key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the piece `key` of a leaf of `shape`; raises BlobError if it does not fit."""
    if isinstance(key, Flat):
        if key.stop > math.prod(shape):
            raise BlobError(f"{format_key(key)} ends beyond the {math.prod(shape)} elements of its leaf")
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


class StoredEntry(NamedTuple):
    """A tensor or piece from `start` to `stop` of a file; `dtype` and `shape` are those of the whole leaf."""

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
class StoredColumns:
    """Adjacent entries of a file as it states them: `forms` are those of the stored bytes.

    Offsets are relative to the data, which start at byte `data_start` of the file. `blocks` are the numbers
    of the first blocks, and the total number.
    """

    forms: Sequence[EntryForm]
    starts: Sequence[int]
    stops: Sequence[int]
    blocks: Sequence[int]
    digests: bytes = b""
    data_start: int = 0

    def bounds(self, numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Begin and end of these entries."""
        if isinstance(numbers, range) and numbers.step == 1:
            some = slice(numbers.start, numbers.stop)
            return self.starts[some], self.stops[some]
        return [self.starts[number] for number in numbers], [self.stops[number] for number in numbers]

    def entry(self, number: int, key: Key, kind: ElementType, shape: tuple[int, ...]) -> StoredEntry:
        """The entry of this number, which is known to be `key`, of this logical type and shape."""
        digests = self.digests[self.blocks[number] * SIZE : self.blocks[number + 1] * SIZE]
        start, stop = self.data_start + self.starts[number], self.data_start + self.stops[number]
        return StoredEntry(key, kind, shape, start, stop, digests)


def too_large(shape: Sequence[int]) -> bool:
    """Whether a shape cannot be allocated: 2**62 beside 0 has no bytes, but breaks its users."""
    return math.prod(max(extent, 1) for extent in shape) >= canonical_json.INTEGER_LIMIT


def are_counts(numbers: Sequence[int]) -> bool:
    """Whether all are whole numbers from 0."""
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


_NOTHING = StoredColumns((), (), (), (0,))
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
                form = self.stored.forms[number]
                found = self.stored.entry(number, Whole(key), dtypes.by_name(form.dtype), form.shape)
            self._known[key] = found
        return found

    def look_at_all(self) -> None:
        """Parse all odd entries in file order, before other threads use them; raises DamagedError."""
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
        return len(self.stored.forms) == len(self._numbers)

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
        forms = self.stored.forms
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
        return self.stored.forms[self._numbers[key]]


METADATA_KEY = "torchrelay"
LEAVES = ":leaves"
"""The value of a blob file with the list of its leaves; not a valid blob name."""
_AT_ONCE = 1 << 16
"""Characters that are parsed at once, so that they stay in the processor's cache."""
_BETWEEN_ENTRIES = ']},"'
_BETWEEN_ROWS = '"],["'


def _windows(text: str, at: int, stop: int, separator: str) -> Iterator[str]:
    """A part of a text in pieces, cut at separators."""
    while stop - at > _AT_ONCE and (end := text.rfind(separator, at, at + _AT_ONCE)) >= 0:
        yield text[at:end]
        at = end + len(separator)
    yield text[at:stop]


def _check_as_it_is(keys: list[str]) -> None:
    """Raise ValueError for keys with JSON escapes."""
    joined = "".join(keys)
    if '"' in joined or "\\" in joined or not joined.isprintable():
        raise ValueError("a text with more than JSON holds as it is")


def written_header(header: bytes, data_bytes: int) -> tuple[str, dict[str, int], StoredColumns] | None:
    """The text of the metadata, the number of each key, and columns; None if JSON must be decoded."""
    head = f'{{"__metadata__":{{"{METADATA_KEY}": '
    try:
        text = str(memoryview(header)[8:], "utf-8")
        metadata, end = canonical_json.text_at(text, len(head))
        stop = text.rfind("]}}")
        if not (text.startswith(head) and text.startswith('},"', end)) or text[stop + 3 :].strip(" "):
            return None
        numbers, columns = _columns(text, end + 3, stop)
    except ValueError:
        return None
    return (metadata, numbers, columns) if columns.stops[-1] == data_bytes else None


def _columns(text: str, at: int, stop: int) -> tuple[dict[str, int], StoredColumns]:
    """Parse `a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...[8,16`; ValueError for others."""
    keys: list[str] = []
    forms: list[EntryForm] = []
    edges = [0]
    known: dict[str, EntryForm] = {}
    for part in _windows(text, at, stop, _BETWEEN_ENTRIES):
        cut = [entry.partition('":') for entry in part.split(_BETWEEN_ENTRIES)]
        said = [entry.rpartition("[") for _, _, entry in cut]
        for form in {form for form, _, _ in said} - known.keys():
            known[form] = _form(form)
        here = [known[form] for form, _, _ in said]
        ends = list(accumulate([form.nbytes for form in here], initial=edges[-1]))
        if [offsets for _, _, offsets in said] != [f"{start},{stop}" for start, stop in pairwise(ends)]:
            raise ValueError("a hole or an overlap")
        keys += [key for key, _, _ in cut]
        forms += here
        edges += ends[1:]
    _check_as_it_is(keys)
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    if len(numbers) < len(keys) or not none_reserved(numbers):
        raise ValueError("a key that occurs twice or is invalid")
    blocks = first_blocks([form.nbytes for form in forms])
    return numbers, StoredColumns(forms, edges[:-1], edges[1:], blocks)


def _form(text: str) -> EntryForm:
    """Parse `{"dtype":"F32","shape":[2],"data_offsets":`; ValueError for others."""
    try:
        said: Json = json.loads(f"{text}0}}")
        kind, shape = dtypes.by_code(said["dtype"]), said["shape"]
    except (KeyError, TypeError, FormatError, RecursionError) as error:
        raise ValueError(text) from error
    if type(shape) is not list or not are_counts(shape) or too_large(shape):
        raise ValueError(text)
    form = form_said(kind.name, tuple(shape))
    if f"{text}[" != form.text:
        raise ValueError(text)
    return form


@dataclass(frozen=True)
class WrittenRows:
    """The list of leaves of a blob file if each is a blob by itself, in the same role, without escapes."""

    names: list[str]
    role: str

    def __len__(self) -> int:
        return len(self.names)


def metadata_with_rows(text: str) -> Json | None:
    """The metadata of a blob file with such rows; None if they must be decoded as JSON."""
    begin = f'"{LEAVES}":{{"leaves":['
    at = text.find(begin) + len(begin)
    stop = text.find('],"sha256":"', at)
    if at < len(begin) or stop < 0:
        return None
    mark = secrets.token_hex(8)  # unpredictable for a file: its place in the result is that of the rows
    try:
        rows = _rows(text, at, stop)
        found = canonical_json.loads(f'{text[:at]}"{mark}"{text[stop:]}', what="", limit_bytes=len(text))
        said = found["values"][LEAVES]
        if said["leaves"] != [mark]:
            return None
    except (ValueError, KeyError, TypeError, DamagedError):
        return None
    said["leaves"] = rows
    return found


def _rows(text: str, at: int, stop: int) -> WrittenRows:
    """Parse `["a","a","tensor"],["b","b","tensor"]`; ValueError for others."""
    role = text[text.rfind('"', at, stop - 2) + 1 : stop - 2]
    if not (text.startswith('["', at) and text.startswith('"]', stop - 2) and role.isalpha()):
        raise ValueError("other rows")
    found: list[str] = []
    for part in _windows(text, at + 2, stop - 2, _BETWEEN_ROWS):
        here = part.split('","')[1::2]
        if part != _BETWEEN_ROWS.join([f'{name}","{name}","{role}' for name in here]):
            raise ValueError("other rows")
        found += here
    _check_as_it_is(found)
    return WrittenRows(found, role)
