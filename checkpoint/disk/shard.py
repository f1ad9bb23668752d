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
from collections.abc import Mapping
from dataclasses import field
from itertools import accumulate

from torchrelay.checkpoint.disk import canonical, digest, version
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.names import ShardName
from torchrelay.checkpoint.disk.shard_entries import Entries, Form
from torchrelay.checkpoint.position import Position
from torchrelay.records import dataclass

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
class Part:
    """The content of one file: entries in stored order, aliases (name to key), values on part 1."""

    identity: ShardIdentity
    number: int
    entries: Entries
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    values_text: bytes | None = field(default=None, compare=False, repr=False)
    """The canonical JSON of `values`, where somebody has made it already."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(self.entries.sizes)


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
        self._head = f'{{"__metadata__":{{"{METADATA_KEY}": {head}{place}'.encode()
        self._tail = (",".join([f"{tail}}}", *_described(part.entries)]) + "}").encode()
        self.data_bytes = part.data_bytes
        self.digest_bytes = digest.SIZE * sum([form.blocks for form in part.entries.forms])
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


def _described(entries: Entries) -> list[str]:
    """What the header says of each, in the order of the file."""
    ends = list(accumulate(entries.sizes, initial=0))
    words = canonical.words(entries.keys)
    return [
        f"{word}:{form.text}{start},{end}]}}"
        for word, form, start, end in zip(words, entries.forms, ends, ends[1:], strict=False)
    ]


def _pieces(part: Part) -> Json:
    return {**part.entries.pieces, **{name: {"alias_of": target} for name, target in part.aliases.items()}}


def entry_cost(key: str, form: Form, piece: Json) -> int:
    """Bytes that an entry takes in the header, at most: what parts are cut by."""
    text = len(f"{canonical.word(key)}:{form.text}{10**17},{10**17}]}}".encode())
    said = canonical.dumps({key: piece})
    digests = 4 * (digest.SIZE * form.blocks // 3 + 1)
    return text + len(_quoted(said.decode()).encode()) + digests + 2


def cost_limit(entries: Entries) -> int:
    """What `entry_cost` of all never exceeds, at once: eight bytes for a character in two places, at most."""
    texts = sum(map(len, entries.keys))
    dimensions = sum([len(form.shape) for form in entries.forms])
    dimensions += sum(len(piece.get("shape", ())) for piece in entries.pieces.values())
    blocks = sum([form.blocks for form in entries.forms])
    return 256 * len(entries) + 8 * texts + 48 * dimensions + 24 * blocks
