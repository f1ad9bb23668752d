"""Parse headers in exactly our writer's form as text, in a third of the time of decoding JSON.

    {"__metadata__":{...},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...}}

Splitting a text at a separator loses nothing. If everything between keys is what a writer would put there,
and keys need no JSON escapes, the result is exactly the written content. Any other text is decoded as JSON.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from itertools import accumulate, pairwise

from torchrelay.checkpoint.format import canonical_json, dtypes, names
from torchrelay.checkpoint.format.shard.entries import (
    EntryColumns,
    EntryForm,
    are_counts,
    form_said,
    too_large,
)
from torchrelay.errors import DamagedError, FormatError
from torchrelay.records import Json, dataclass

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


@dataclass(frozen=True)
class HeaderText:
    """The text of the metadata, the number of each key, and the columns of valid entries."""

    metadata: str
    numbers: dict[str, int]
    columns: EntryColumns | None


def written_header(header: bytes, data_bytes: int) -> HeaderText | None:
    """Parse the bytes before `data_bytes` bytes of data; None if they must be decoded as JSON."""
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
    return HeaderText(metadata, numbers, columns) if columns.stops[-1] == data_bytes else None


def _columns(text: str, at: int, stop: int) -> tuple[dict[str, int], EntryColumns]:
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
    if len(numbers) < len(keys) or not names.none_kept(numbers):
        raise ValueError("a key that occurs twice or is invalid")
    blocks = dtypes.first_blocks([form.nbytes for form in forms])
    return numbers, EntryColumns(forms, edges[:-1], edges[1:], blocks)


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
    """The list of leaves of a blob file if each is a blob by itself, in the same role.

    No name has a character that JSON would escape.
    """

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
