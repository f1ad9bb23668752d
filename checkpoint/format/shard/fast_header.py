r"""Headers as our writer writes them, taken apart as text: a third of the time of decoding their JSON.

Ten megabytes at once cost more for the memory that they come to lie in than for anything done with them.

    \":leaves\":{\"leaves\":[[\"name\",\"name\",\"tensor\"],[...]],\"sha256\":\"...\"}

Of a file of nothing but tensors that are blobs by themselves it says little that the entries do not say:
their order and one role. Each row is compared with what it must be, so nothing else passes. Of any other list
nothing is said here: the metadata are decoded with it.

    {"__metadata__":{...},"name":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]},"name":...}

Splitting at separators loses nothing, so the text is what was put together of the parts found. What the
parts are is proved of each: names are plain and differ, forms (few for very many entries) are decoded,
offsets are the very text that follows from the sizes. Of any other header nothing is said here.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field
from itertools import accumulate, pairwise

from torchrelay.checkpoint.format import canonical_json, dtypes, names
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.dtypes import first_blocks
from torchrelay.checkpoint.format.shard.entries import Columns, Form, form_said
from torchrelay.checkpoint.format.shard.layout import METADATA_KEY
from torchrelay.errors import FormatError
from torchrelay.records import dataclass

WINDOW = 1 << 16
"""Bytes of a window at most, unless there is no separator in as many."""


def windows(data: bytes, part: range, separator: bytes) -> Iterator[str]:
    """A part of the data in windows, cut where there is a separator, which is in none of both.

    Raises ValueError for what is no UTF-8.
    """
    at, view = part.start, memoryview(data)
    while True:
        end = data.rfind(separator, at, at + WINDOW) if at + WINDOW < part.stop else part.stop
        if end < 0:
            end = data.find(separator, at, part.stop)
        end = part.stop if end < 0 else end
        yield str(view[at:end], "utf-8")
        if end == part.stop:
            return
        at = end + len(separator)


LEAVES = ":leaves"
"""The value that is the list; no blob can have that name."""
_BEFORE = f'\\"{LEAVES}\\":{{\\"leaves\\":['.encode()
_AFTER = b'],\\"sha256\\":\\"'
_OPEN, _BETWEEN_LEAVES, _CLOSE = '[\\"', '\\"],[\\"', '\\"]'
_COMMA = '\\",\\"'


@dataclass(frozen=True)
class ListedLeaves:
    """The numbers of all entries, in the order of the leaves, each a blob by itself in the same role."""

    role: str
    numbers: Sequence[int]
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """What stands in place of the rows when the metadata are decoded; no file can know it."""

    @property
    def place(self) -> bytes:
        """The mark as the text of the metadata has it."""
        return f'\\"{self.mark}\\"'.encode()


def place_of_rows(header: bytes, start: int, stop: int) -> range | None:
    """Where in the metadata the rows are of the first list that looks so; None where there is none."""
    at = header.find(_BEFORE, start, stop) + len(_BEFORE)
    end = header.find(_AFTER, at, stop) if at >= len(_BEFORE) else -1
    return range(at, end) if end >= 0 else None


def understood(header: bytes, rows: range, numbers: Mapping[str, int]) -> ListedLeaves | None:
    """What rows say of the entries of these names, which hold no quotes or escapes; None where it is more.

    Raises ValueError for what is no UTF-8.
    """
    role = (
        header[max(rows.start, rows.stop - 100) : rows.stop].decode("utf-8", "replace").rpartition(_COMMA)[2]
    )
    role = role.removesuffix(_CLOSE)
    first, last = _OPEN.encode(), (role + _CLOSE).encode()
    inner = range(rows.start + len(first), rows.stop - len(_CLOSE))
    if not (
        header.startswith(first, *_ends(rows)) and header.endswith(last, *_ends(rows)) and role.isalpha()
    ):
        return None
    found: list[int | None] = []
    for text in windows(header, inner, _BETWEEN_LEAVES.encode()):
        blobs = _blobs(text, role)
        if blobs is None:
            return None
        found += map(numbers.get, blobs)
    known = [number for number in found if number is not None]
    return ListedLeaves(role, known) if len(found) == len(set(known)) == len(numbers) else None


def _ends(part: range) -> tuple[int, int]:
    return part.start, part.stop


def _blobs(text: str, role: str) -> list[str] | None:
    """The blobs of rows in this role, of which each is its only leaf; None for other rows.

    What stands between two commas ends a row and has the name of the next one.
    """
    first, *rest = text.split(_COMMA)
    blobs, opened, ended = rest[0::2], rest[1::2], role + _BETWEEN_LEAVES
    expected = [*map(ended.__add__, blobs[1:]), role]
    return blobs if blobs and first == blobs[0] and opened == expected else None


def was_cut(values: Json, names: Set[str], mark: str) -> bool:
    """Whether it was the list of the file that was taken out, for the mark; that list is empty from now on.

    And that no value has the name of an entry, so that a row means the entry.
    """
    if not isinstance(values, dict) or not isinstance(found := values.get(LEAVES), dict):
        return False
    if found.get("leaves") != [mark] or not names.isdisjoint(values):
        return False
    found["leaves"] = []
    return True


_BEGIN = b'{"__metadata__":'
_ENTRIES = b'"},"'
"""No text of the metadata holds this: its quotes are escaped."""
_NAMED = '":{'
_BOUNDED = ',"data_offsets":['
_BETWEEN_ENTRIES = ']},"'
_END = b"]}}"


@dataclass(frozen=True)
class QuickHeader:
    """The text that the metadata hold, and the number of each entry by its name, which is its key.

    Of a blob file whose list of leaves says no more than `listed` tells, the text has but its mark there.
    """

    metadata: str
    numbers: dict[str, int]
    columns: Columns
    listed: ListedLeaves | None


def quick_header(header: bytes, data_bytes: int, listing: bool) -> QuickHeader | None:
    """The parts of a file's bytes before so many of data, all checked; None where it has to be decoded.

    `listing` says that the file is a blob file, whose list of leaves is then looked at as text, too.
    """
    first, last = 8 + len(_BEGIN), header.rfind(_END)
    rows = place_of_rows(header, first, last) if listing else None
    if rows and header.find(_ENTRIES, first, rows.start) >= 0:
        rows = None
    middle = header.find(_ENTRIES, rows.stop if rows else first, last)
    if header.find(b"@", middle, last) >= 0:  # a box or a range, which has to be looked at alone
        return None
    if middle < 0 or not header.startswith(_BEGIN, 8) or header[last + len(_END) :].strip(b" "):
        return None
    try:
        columns = _columns(header, range(middle + len(_ENTRIES), last), data_bytes)
        if columns is None:
            return None
        listed = understood(header, rows, columns[0]) if rows else None
        if rows and listed:
            parts = [header[first : rows.start], listed.place, header[rows.stop : middle + 2]]
        elif header.find(_ENTRIES, first) == middle:
            parts = [header[first : middle + 2]]
        else:
            return None
        return QuickHeader(_metadata(parts), *columns, listed)
    except (ValueError, KeyError, AttributeError):
        return None


def _metadata(parts: Iterable[bytes]) -> str:
    """The text that the metadata hold; raises ValueError, KeyError or AttributeError for others."""
    text = b"".join(parts).decode("utf-8")
    metadata, end = canonical_json.decoded_at(text, 0)
    said = metadata[METADATA_KEY] if type(metadata) is dict and len(metadata) == 1 else ""
    said.encode("utf-8")  # an escape may stand for half a character
    if not said or end < len(text):
        raise ValueError("no metadata of a shard")
    return said


def _columns(header: bytes, part: range, data_bytes: int) -> tuple[dict[str, int], Columns] | None:
    """Of a text such as `a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...[8,16`."""
    bounded = _BOUNDED.encode()
    end = header.rfind(bounded, part.start, part.stop)
    if end < 0:
        return None
    found = _Entries()
    for text in windows(header, range(part.start, end), bounded):
        if not found.take(text.split(_BOUNDED)):
            return None
    numbers = dict(zip(found.keys, range(len(found.keys)), strict=True))
    if len(numbers) < len(found.keys) or not names.none_kept(numbers):
        return None
    rest = header[end + len(bounded) : part.stop] + _BETWEEN_ENTRIES.encode()
    if rest != found.before.encode() or found.stops[-1] != data_bytes:
        return None
    blocks = first_blocks([form.nbytes for form in found.forms])
    return numbers, Columns(found.forms, [0, *found.stops[:-1]], found.stops, blocks)


@dataclass
class _Entries:
    """Entries as far as they were understood; `before` is what must stand before the name of the next."""

    keys: list[str] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    before: str = ""
    known: dict[str, Form | None] = field(default_factory=dict)

    def take(self, described: Sequence[str]) -> bool:
        """Go on with texts such as `0,8]},"b":{"dtype":"F32","shape":[2]`; False for others.

        What stands before a name is taken away where it is what it must be. Where it is not, more stays
        than there should be; so if the characters are as many as they should be, it was so everywhere.
        """
        divided = [one.rpartition(_NAMED) for one in described]
        heads, texts = [head for head, _, _ in divided], [text for _, _, text in divided]
        self.known |= {text: _form(text) for text in set(texts) - self.known.keys()}
        forms: list[Form] = list(map(self.known.__getitem__, texts))  # type: ignore[arg-type]
        if None in forms:
            return False
        before = self.stops[-1] if self.stops else 0
        stops = list(accumulate([form.nbytes for form in forms], initial=before))
        edges = list(map(str, stops))
        prefixes = [self.before, *[f"{start},{stop}{_BETWEEN_ENTRIES}" for start, stop in pairwise(edges)]]
        self.before = prefixes.pop()
        keys = list(map(str.removeprefix, heads, prefixes))
        joined = "".join(keys)
        if len(joined) + sum(map(len, prefixes)) != sum(map(len, heads)) or '"' in joined or "\\" in joined:
            return False
        self.keys += keys
        self.forms += forms
        self.stops += stops[1:]
        return names.holds_plain(joined)


def _form(text: str) -> Form | None:
    """The form that is meant by `"dtype":"F32","shape":[1000]`; None for others."""
    try:
        said: Json = json.loads(f"{{{text}}}")
        kind, shape = dtypes.by_code(said["dtype"]), said["shape"]
    except (ValueError, KeyError, TypeError, FormatError, RecursionError):
        return None
    if type(shape) is not list or not all(type(extent) is int and extent > 0 for extent in shape):
        return None
    if math.prod(shape) * kind.itemsize >= canonical_json.INTEGER_LIMIT:
        return None
    form = form_said(kind.name, tuple(shape))
    return form if f"{{{text}{_BOUNDED}" == form.text else None
