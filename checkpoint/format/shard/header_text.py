"""Headers exactly as our writer puts them, taken apart as text: a third of the time of decoding JSON.

    {"__metadata__":{...},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...}}

Cutting a text at a separator loses nothing. So where all that lies between keys is what a writer would put
there, and keys are what JSON holds as it is, the text says what the writer says, and nothing twice. Of any
other text nothing is said here: it is decoded.
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
"""The value of a blob file that is the list of its leaves; no blob can have that name."""
_AT_ONCE = 1 << 16
"""Characters that are taken apart at once, while the processor's cache has them."""
_BETWEEN_ENTRIES = ']},"'
_BETWEEN_ROWS = '"],["'


def _windows(text: str, at: int, stop: int, separator: str) -> Iterator[str]:
    """A part of a text in parts, cut where there is a separator."""
    while stop - at > _AT_ONCE and (end := text.rfind(separator, at, at + _AT_ONCE)) >= 0:
        yield text[at:end]
        at = end + len(separator)
    yield text[at:stop]


def _check_as_it_is(keys: list[str]) -> None:
    joined = "".join(keys)
    if '"' in joined or "\\" in joined or not joined.isprintable():
        raise ValueError("a text with more than JSON holds as it is")


@dataclass(frozen=True)
class HeaderText:
    """The text of the metadata, the number of each key, and the columns of entries that are all good."""

    metadata: str
    numbers: dict[str, int]
    columns: EntryColumns | None


def written_header(header: bytes, data_bytes: int) -> HeaderText | None:
    """What all bytes before so many of data say; None for what has to be decoded."""
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
    """Of `a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{...[8,16`; ValueError for others."""
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
        raise ValueError("a key that occurs twice or is none")
    blocks = dtypes.first_blocks([form.nbytes for form in forms])
    return numbers, EntryColumns(forms, edges[:-1], edges[1:], blocks)


def _form(text: str) -> EntryForm:
    """The form that is meant by `{"dtype":"F32","shape":[2],"data_offsets":`; ValueError for others."""
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
    """The list of leaves of a blob file where each is a blob of its own name, in the same role.

    No name has a character that JSON would escape.
    """

    names: list[str]
    role: str

    def __len__(self) -> int:
        return len(self.names)


def metadata_with_rows(text: str) -> Json | None:
    """The metadata of a blob file with such rows as the list of leaves; None for what has to be decoded."""
    begin = f'"{LEAVES}":{{"leaves":['
    at = text.find(begin) + len(begin)
    stop = text.find('],"sha256":"', at)
    if at < len(begin) or stop < 0:
        return None
    mark = secrets.token_hex(8)  # no file can know it: where it comes out, there the rows were
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
    """Of `["a","a","tensor"],["b","b","tensor"]`; ValueError for others."""
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
