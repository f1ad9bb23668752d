"""What a shard file is: entries, their order and places, and the header that describes them.

    8 bytes   length of the header, little-endian
    header    JSON as safetensors defines it, padded with spaces so that the data start at a
              multiple of 4096; `__metadata__["torchrelay"]` is one JSON text (see `header_bytes`)
    data      the bytes of all entries, item size descending, then key; no gap between them

The length of the header follows from the plan alone, because digests have a fixed width: a writer
reserves the header's place, writes the data, and fills the header in last.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk import canonical, digest, dtypes, version
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.lazily import lazily
from torchrelay.checkpoint.disk.names import Box, Flat, Key, ShardName, format_key
from torchrelay.checkpoint.position import Position
from torchrelay.errors import BlobError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 4096
METADATA_KEY = "torchrelay"
_quoted = json.JSONEncoder(ensure_ascii=False).encode
"""A text as JSON; JSON within JSON is quoted twice."""


@dataclass(frozen=True)
class ShardIdentity:
    """Whose shard this is: the job's name, the position, the node, the group and the try."""

    job: str
    position: Position
    node: str
    group: str
    try_name: str

    def file(self, part: int) -> ShardName:
        """The name of one of its files."""
        return ShardName(self.node, self.position, self.group, part)


@dataclass(frozen=True)
class ShardEntry:
    """One tensor, or a piece of one, that goes into a shard.

    `dtype` (torch's name for it) and `shape` are those of the whole leaf; `data` is what is stored:
    the piece as a tensor or as 1-D bytes, kept by reference until it is written.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    data: torch.Tensor | memoryview

    @lazily
    def text(self) -> str:
        """The key as the header has it; raises BlobError for a name that cannot be one."""
        return format_key(self.key)

    @lazily
    def element(self) -> dtypes.ElementType:
        """The logical element type."""
        return dtypes.by_name(self.dtype)

    @lazily
    def piece_shape(self) -> tuple[int, ...]:
        """The logical shape of what is stored."""
        return piece_shape(self.key, self.shape)

    @lazily
    def nbytes(self) -> int:
        """Bytes in the file, known without touching the data."""
        return self.element.nbytes(self.piece_shape)


def piece_shape(key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the piece `key` of a leaf of `shape` has; raises BlobError if it is no piece of it."""
    if isinstance(key, Flat):
        if key.stop > _count(shape):
            raise BlobError(f"{format_key(key)} ends beyond the {_count(shape)} elements of its leaf")
        return (key.stop - key.start,)
    if isinstance(key, Box):
        if len(key.intervals) != len(shape) or any(
            b > n for (_, b), n in zip(key.intervals, shape, strict=True)
        ):
            raise BlobError(f"{format_key(key)} is no box of a leaf of shape {list(shape)}")
        return tuple(stop - start for start, stop in key.intervals)
    return shape


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


@dataclass(frozen=True)
class Part:
    """The content of one file: entries in stored order, aliases (name to key), values on part 1."""

    identity: ShardIdentity
    number: int
    entries: tuple[ShardEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)


def ordered(entries: Sequence[ShardEntry]) -> tuple[ShardEntry, ...]:
    """Stored order: item size descending, so that every tensor is aligned, then key."""
    return tuple(sorted(entries, key=lambda entry: (-entry.element.itemsize, entry.text)))


def header_bytes(part: Part, digests: bytes) -> bytes:
    """Everything before the data; its length does not depend on what the digests are.

    The metadata's JSON: format, job, position, node, group, try, part, digest, block, values (typed),
    digests (base64 in key order), and pieces: for keys whose logical dtype or leaf shape is not what
    the entry says, `{"dtype", "shape"}`; for names stored under another key, `{"alias_of"}`.
    """
    return HeaderFrame(part).filled(digests)


class HeaderFrame:
    """The header of a part but for its digests, which become known when the data are written."""

    def __init__(self, part: Part) -> None:
        metadata = _quoted(canonical.dumps(_metadata(part, b"")).decode())
        # Only `block` and `digest` sort before `digests`: the first place that looks so is the place.
        head, place, tail = metadata.partition(_quoted('"digests":"')[1:-1])
        texts, offset = [f"{tail}}}"], 0
        for entry in part.entries:
            texts.append(_entry_text(entry, offset))
            offset += entry.nbytes
        self._head = f'{{"__metadata__":{{"{METADATA_KEY}": {head}{place}'.encode()
        self._tail = (",".join(texts) + "}").encode()
        self.data_bytes = offset
        self.digest_bytes = digest.SIZE * sum(digest.block_count(entry.nbytes) for entry in part.entries)
        length = 8 + len(self._head) + 4 * -(-self.digest_bytes // 3) + len(self._tail)
        self.nbytes = length + -length % ALIGNMENT

    def filled(self, digests: bytes) -> bytes:
        """All bytes before the data."""
        text = self._head + base64.b64encode(digests) + self._tail
        return (self.nbytes - 8).to_bytes(8, "little") + text.ljust(self.nbytes - 8)


def _entry_text(entry: ShardEntry, offset: int) -> str:
    kind = entry.element
    shape = ",".join(map(str, kind.stored_shape(entry.piece_shape)))
    return (
        f'{_quoted(entry.text)}:{{"dtype":"{kind.code}","shape":[{shape}],'
        f'"data_offsets":[{offset},{offset + entry.nbytes}]}}'
    )


def _metadata(part: Part, digests: bytes) -> Json:
    identity = part.identity
    return {
        "format": version.stamp(),
        "job": identity.job,
        "position": [identity.position.epoch, identity.position.step],
        "node": identity.node,
        "group": identity.group,
        "try": identity.try_name,
        "part": part.number,
        "digest": digest.NAME,
        "block": digest.BLOCK,
        "digests": base64.b64encode(digests).decode("ascii"),
        "values": dict(part.values),
        "pieces": _pieces(part),
    }


def _pieces(part: Part) -> Json:
    pieces: dict[str, Json] = {}
    for entry in part.entries:
        if said := _piece(entry):
            pieces[entry.text] = said
    for name, target in part.aliases.items():
        pieces[name] = {"alias_of": target}
    return pieces


def _piece(entry: ShardEntry) -> Json:
    said: dict[str, Json] = {}
    if entry.element.raw:
        said["dtype"] = entry.dtype
    if entry.element.raw or entry.piece_shape != entry.shape or isinstance(entry.key, (Box, Flat)):
        said["shape"] = list(entry.shape)
    return said


def entry_cost(entry: ShardEntry) -> int:
    """Bytes that an entry takes in the header, at most: what parts are cut by."""
    text = len(_entry_text(entry, 10**17).encode())
    piece = canonical.dumps({entry.text: _piece(entry)})
    digests = 4 * (digest.SIZE * digest.block_count(entry.nbytes) // 3 + 1)
    return text + len(_quoted(piece.decode()).encode()) + digests + 2


def entry_cost_limit(entry: ShardEntry) -> int:
    """What `entry_cost` never exceeds, at once: eight bytes for a character in two places, at most."""
    return 256 + 8 * len(entry.text) + 48 * len(entry.shape) + 24 * digest.block_count(entry.nbytes)
