"""Headers as our writer writes them, taken apart as text: a third of the time of decoding their JSON.

    {"__metadata__":{...},"name":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]},"name":...}

Splitting at separators loses nothing, so the text is what was put together of the parts found. What the
parts are is proved of each: names are plain and differ, forms (few for very many entries) are decoded,
offsets are the very text that follows from the sizes. Of any other header nothing is said here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import accumulate, pairwise

from torchrelay.checkpoint.disk import canonical, dtypes, names
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.digest import first_blocks
from torchrelay.checkpoint.disk.listed_leaves import ListedLeaves, place_of_rows, understood
from torchrelay.checkpoint.disk.shard import METADATA_KEY
from torchrelay.checkpoint.disk.shard_entries import Form, form_said
from torchrelay.checkpoint.disk.stored_entries import Columns
from torchrelay.checkpoint.disk.text_windows import windows
from torchrelay.errors import FormatError
from torchrelay.records import dataclass

_BEGIN = b'{"__metadata__":'
_ENTRIES = b'"},"'
"""No text of the metadata holds this: its quotes are escaped."""
_NAMED = '":{'
_BOUNDED = ',"data_offsets":['
_BETWEEN = ']},"'
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
    metadata, end = canonical.decoded_at(text, 0)
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
    rest = header[end + len(bounded) : part.stop] + _BETWEEN.encode()
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
        prefixes = [self.before, *[f"{start},{stop}{_BETWEEN}" for start, stop in pairwise(edges)]]
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
    if math.prod(shape) * kind.itemsize >= canonical.INTEGER_LIMIT:
        return None
    form = form_said(kind.name, tuple(shape))
    return form if f"{{{text}{_BOUNDED}" == form.text else None
