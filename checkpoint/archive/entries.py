"""What an archive's manifest says of each tensor, and what a safetensors member says of where it lies."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.format.canonical_json import Fields, Json
from torchrelay.checkpoint.format.dtypes import SIZE, ElementType, block_count
from torchrelay.errors import BlobError, DamagedError
from torchrelay.records import dataclass

HEADER_LIMIT = 100_000_000
PARAMETER, BUFFER, OTHER = "parameter", "buffer", "other"
_DIMENSIONS, _ELEMENTS = 64, 2**58
ROLES = (PARAMETER, BUFFER, OTHER)


@dataclass(frozen=True)
class Entry:
    """A stored tensor: `element` and `shape` are the logical ones, `digests` xxh3-128 per MiB.

    `role` says what it is in a model; of parameters `trainable` says whether they had gradients.
    """

    element: ElementType
    shape: tuple[int, ...]
    role: str = OTHER
    trainable: bool = False
    digests: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.element.nbytes(self.shape)

    def to_json(self) -> Json:
        """As the manifest has it."""
        return {
            "dtype": self.element.name,
            "shape": list(self.shape),
            "role": self.role,
            "trainable": self.trainable,
            "digests": base64.b64encode(self.digests).decode("ascii"),
        }


def entry_from_json(fields: Fields) -> Entry:
    """Back; raises DamagedError."""
    shape = fields.items("shape")
    if not _possible(shape) or fields.text("role") not in ROLES:
        raise fields.wrong("shape")
    element = dtypes.by_name(fields.text("dtype"))
    try:
        digests = base64.b64decode(fields.text("digests"), validate=True)
    except (binascii.Error, ValueError):
        raise fields.wrong("digests") from None
    entry = Entry(element, tuple(shape), fields.text("role"), fields.flag("trainable"), digests)
    if len(digests) != block_count(entry.nbytes) * SIZE:
        raise fields.wrong("digests")
    return entry


def _possible(shape: list[Json]) -> bool:
    """Whether torch can have it: also of an empty tensor it multiplies the other sizes."""
    if len(shape) > _DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        return False
    return bool(math.prod(size for size in shape if size) < _ELEMENTS)


def ordered(entries: Mapping[str, Entry]) -> list[str]:
    """The names in the order in which their bytes lie: larger items first, so that all are aligned."""
    return sorted(entries, key=lambda name: (-entries[name].element.itemsize, name))


def header_bytes(entries: Mapping[str, Entry], alignment: int) -> bytes:
    """The length and header of a safetensors member of these tensors, padded to `alignment`.

    Raises BlobError for a name that safetensors cannot have.
    """
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in ordered(entries):
        entry = entries[name]
        if name == "__metadata__":
            raise BlobError("a tensor cannot be called '__metadata__' in a safetensors file: rename it")
        found[name] = {
            "dtype": entry.element.code,
            "shape": list(entry.element.stored_shape(entry.shape)),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    if len(text) > HEADER_LIMIT:
        raise BlobError(f"{len(entries)} tensors are too many for one file")
    return len(text).to_bytes(8, "little") + text


def places(header: bytes, data: int, nbytes: int, entries: Mapping[str, Entry], what: str) -> dict[str, int]:
    """Where each tensor begins within the member, by its header, which must fit the manifest.

    `data` is where the bytes begin, `nbytes` the size of the member. Raises DamagedError.
    """
    found = canonical_json.loads(header, what=what, limit_bytes=HEADER_LIMIT)
    if not isinstance(found, dict):
        raise DamagedError(f"{what}: its header is no object")
    found.pop("__metadata__", None)
    if set(found) != set(entries):
        odd = sorted(set(found) ^ set(entries))[0]
        raise DamagedError(f"{what}: manifest and header do not have the same tensors ({odd[:100]!r})")
    placed = {
        name: _place(found[name], entry, data, nbytes, f"{what} ({name})") for name, entry in entries.items()
    }
    _check_apart(placed, entries, what)
    return placed


def _check_apart(placed: Mapping[str, int], entries: Mapping[str, Entry], what: str) -> None:
    """No byte is read twice, so an archive gives no more memory than it has."""
    end = 0
    for name in sorted((one for one in placed if entries[one].nbytes), key=lambda one: placed[one]):
        if placed[name] < end:
            raise DamagedError(f"{what} ({name}): its bytes are those of another tensor, too")
        end = placed[name] + entries[name].nbytes


def _place(said: Json, entry: Entry, data: int, nbytes: int, what: str) -> int:
    shape = list(entry.element.stored_shape(entry.shape))
    match said:
        case {"dtype": code, "shape": stored, "data_offsets": [int(start), int(stop)]}:
            fits = code == entry.element.code and stored == shape and stop - start == entry.nbytes
            if fits and start >= 0 and data + stop <= nbytes:
                return data + start
    raise DamagedError(f"{what}: the header does not say what the manifest says")
