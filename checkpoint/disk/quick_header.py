"""Headers as our writer writes them, taken apart as text: a third of the time of decoding their JSON.

    {"__metadata__":{...},"name":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]},"name":...}

Splitting at separators loses nothing, so the text is what was put together of the parts found. What the
parts are is proved of each: names are plain and differ, forms (few for very many entries) are decoded,
offsets are the very text that follows from the sizes. Of any other header nothing is said here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchrelay.checkpoint.disk import canonical, dtypes, names
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.digest import first_blocks
from torchrelay.checkpoint.disk.shard import METADATA_KEY
from torchrelay.checkpoint.disk.shard_entries import Form, form_said
from torchrelay.checkpoint.disk.stored_entries import Columns
from torchrelay.errors import FormatError

_BEGIN = '{"__metadata__":'
_BETWEEN = ']},"'
_END = "]}}"


@dataclass(frozen=True)
class QuickHeader:
    """The text that the metadata hold, and the number of each entry by its name, which is its key."""

    metadata: str
    numbers: dict[str, int]
    columns: Columns


def quick_header(header: bytes, data_bytes: int) -> QuickHeader | None:
    """The parts of a header for so many bytes of data, all checked; None where it has to be decoded."""
    try:
        text = header.decode("utf-8").rstrip(" ")
        metadata, end = canonical.decoded_at(text, len(_BEGIN)) if text.startswith(_BEGIN) else (None, 0)
        said = metadata[METADATA_KEY] if type(metadata) is dict and len(metadata) == 1 else ""
        said.encode("utf-8")  # an escape may stand for half a character
    except (ValueError, KeyError, AttributeError):
        return None
    if not (said and text.startswith(',"', end) and text.endswith(_END)):
        return None
    found = _columns(text[end + 2 : -len(_END)].split(_BETWEEN), data_bytes)
    return QuickHeader(said, *found) if found else None


def _columns(entries: Sequence[str], data_bytes: int) -> tuple[dict[str, int], Columns] | None:
    """Of texts such as `name":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000`."""
    bounded = [entry.rpartition(":[") for entry in entries]
    named = [head.partition('":{') for head, _, _ in bounded]
    keys = [name for name, _, _ in named]
    if not names.all_plain(keys) or '"' in (joined := "".join(keys)) or "\\" in joined:
        return None
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    if len(numbers) < len(keys):
        return None
    forms = [form for _, _, form in named]
    known = {form: _form(form) for form in set(forms)}
    if None in known.values():
        return None
    described = list(map(known.__getitem__, forms))
    sizes = [form.nbytes for form in described]  # type: ignore[union-attr]
    stops = list(accumulate(sizes))
    starts = [0, *stops[:-1]]
    expected = [f"{start},{stop}" for start, stop in zip(starts, stops, strict=True)]
    if [bounds for _, _, bounds in bounded] != expected or stops[-1] != data_bytes:
        return None
    return numbers, Columns(described, starts, stops, first_blocks(sizes))  # type: ignore[arg-type]


def _form(text: str) -> Form | None:
    """The form that is meant by `"dtype":"F32","shape":[1000],"data_offsets"`; None for others."""
    try:
        said: Json = json.loads(f"{{{text}:0}}")
        kind, shape = dtypes.by_code(said["dtype"]), said["shape"]
    except (ValueError, KeyError, TypeError, FormatError, RecursionError):
        return None
    if type(shape) is not list or not all(type(extent) is int and extent > 0 for extent in shape):
        return None
    if math.prod(shape) * kind.itemsize >= canonical.INTEGER_LIMIT:
        return None
    form = form_said(kind.name, tuple(shape))
    return form if f"{{{text}:[" == form.text else None
