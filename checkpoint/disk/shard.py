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
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from torchrelay.checkpoint.disk import canonical, digest, dtypes, version
from torchrelay.checkpoint.disk.boxes import Bounds
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.immutable import immutable
from torchrelay.checkpoint.disk.lazily import lazily
from torchrelay.checkpoint.disk.names import Box, Flat, Key, ShardName, Whole, all_plain, format_key
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


@immutable()
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

    @property
    def is_whole(self) -> bool:
        """Whether a whole leaf is stored, under its own name."""
        return type(self.key) is Whole

    @lazily
    def element(self) -> dtypes.ElementType:
        """The logical element type."""
        return dtypes.by_name(self.dtype)

    @lazily
    def piece_shape(self) -> tuple[int, ...]:
        """The logical shape of what is stored."""
        return self.shape if type(self.key) is Whole else piece_shape(self.key, self.shape)

    @lazily
    def form(self) -> _Form:
        """What follows from element type and piece alone."""
        return _form(self.dtype, self.piece_shape)

    @lazily
    def nbytes(self) -> int:
        """Bytes in the file, known without touching the data."""
        return self.form.nbytes


class _Form(NamedTuple):
    """What entries of one element type and shape have in common: few of them, for very many entries.

    `text` is what their header says before the offsets, `raw` whether elements are stored as plain bytes.
    """

    nbytes: int
    blocks: int
    itemsize: int
    text: str
    raw: bool


@lru_cache(maxsize=1 << 14)
def _form(dtype: str, shape: tuple[int, ...]) -> _Form:
    kind = dtypes.by_name(dtype)
    stored = ",".join(map(str, kind.stored_shape(shape)))
    text = f'{{"dtype":"{kind.code}","shape":[{stored}],"data_offsets":['
    nbytes = kind.nbytes(shape)
    return _Form(nbytes, digest.block_count(nbytes), kind.itemsize, text, kind.raw)


def know_all(entries: Sequence[ShardEntry]) -> None:
    """Work out all at once what `lazily` finds, where keys are plain names, as nearly all are."""
    names = [entry.key.name for entry in entries]
    if not names or not all([entry.is_whole for entry in entries]) or not all_plain(names):  # noqa: C419
        return
    for entry, name in zip(entries, names, strict=True):
        known = entry.__dict__
        known["text"] = name
        known["form"] = form = _form(entry.dtype, entry.shape)
        known["nbytes"] = form.nbytes


def piece_shape(key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the piece `key` of a leaf of `shape` has; raises BlobError if it is no piece of it."""
    if isinstance(key, Flat):
        if key.stop > _count(shape):
            raise BlobError(f"{format_key(key)} ends beyond the {_count(shape)} elements of its leaf")
        return (key.stop - key.start,)
    if isinstance(key, Box):
        extents = _extents(key.intervals, shape)
        if extents is None:
            raise BlobError(f"{format_key(key)} is no box of a leaf of shape {list(shape)}")
        return extents
    return shape


@lru_cache(maxsize=1 << 10)
def _extents(box: Bounds, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those of a box; None where it does not lie in the shape."""
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        return None
    return tuple(stop - start for start, stop in box)


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
    values_text: bytes | None = field(default=None, compare=False, repr=False)
    """The canonical JSON of `values`, where somebody has made it already."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)


def ordered(entries: Sequence[ShardEntry]) -> tuple[ShardEntry, ...]:
    """Stored order: item size descending, so that every tensor is aligned, then key."""
    found = sorted(entries, key=attrgetter("text"))
    if len({entry.form.itemsize for entry in found}) > 1:
        found.sort(key=lambda entry: -entry.form.itemsize)
    return tuple(found)


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
        metadata = _quoted(_metadata(part, b"").decode())
        # Only `block` and `digest` sort before `digests`: the first place that looks so is the place.
        head, place, tail = metadata.partition(_quoted('"digests":"')[1:-1])
        texts, offset = [f"{tail}}}"], 0
        words = canonical.words([entry.text for entry in part.entries])
        for word, entry in zip(words, part.entries, strict=True):
            end = offset + entry.nbytes
            texts.append(f"{word}:{entry.form.text}{offset},{end}]}}")
            offset = end
        self._head = f'{{"__metadata__":{{"{METADATA_KEY}": {head}{place}'.encode()
        self._tail = (",".join(texts) + "}").encode()
        self.data_bytes = offset
        self.digest_bytes = digest.SIZE * sum([entry.form.blocks for entry in part.entries])
        length = 8 + len(self._head) + 4 * -(-self.digest_bytes // 3) + len(self._tail)
        self.nbytes = length + -length % ALIGNMENT

    def filled(self, digests: bytes) -> bytes:
        """All bytes before the data."""
        text = self._head + base64.b64encode(digests) + self._tail
        return (self.nbytes - 8).to_bytes(8, "little") + text.ljust(self.nbytes - 8)


def _metadata(part: Part, digests: bytes) -> bytes:
    """As canonical JSON, of which the values come last."""
    identity, values = part.identity, part.values_text
    said = {
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
        "pieces": _pieces(part),
    }
    text = canonical.dumps(said)[:-1]
    if values is None:
        values = canonical.dumps(dict(part.values), within=1)
    return b'%b,"values":%b}' % (text, values)


def _pieces(part: Part) -> Json:
    pieces: dict[str, Json] = {}
    for entry in part.entries:
        if (not entry.is_whole or entry.form.raw) and (said := _piece(entry)):
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
    text = len(f"{canonical.word(entry.text)}:{entry.form.text}{10**17},{10**17}]}}".encode())
    piece = canonical.dumps({entry.text: _piece(entry)})
    digests = 4 * (digest.SIZE * entry.form.blocks // 3 + 1)
    return text + len(_quoted(piece.decode()).encode()) + digests + 2


def cost_limit(entries: Sequence[ShardEntry]) -> int:
    """What `entry_cost` of all never exceeds, at once: eight bytes for a character in two places, at most."""
    texts = sum([len(entry.text) for entry in entries])
    dimensions = sum([len(entry.shape) for entry in entries])
    return 256 * len(entries) + 8 * texts + 48 * dimensions + 24 * sum([one.form.blocks for one in entries])
