"""What a shard file is: entries, their order and places, and files of bounded size.

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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import accumulate, pairwise

from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.format.names import Key, ShardName, encode_name, format_key
from torchrelay.checkpoint.format.shard.entries import Entries, Form
from torchrelay.errors import BlobError
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
        self.digest_bytes = dtypes.SIZE * sum([form.blocks for form in part.entries.forms])
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
        "format": canonical_json.stamp(),
        "job": identity.job,
        "position": [identity.position.epoch, identity.position.step],
        "node": identity.node,
        "group": identity.group,
        "try": identity.try_name,
        "part": part.number,
        "digest": dtypes.NAME,
        "block": dtypes.BLOCK,
        "digests": base64.b64encode(digests).decode("ascii"),
        "pieces": _pieces(part),
    }
    text = canonical_json.dumps(said)[:-1]
    if values is None:
        values = canonical_json.dumps(dict(part.values), within=1)
    return b'%b,"values":%b}' % (text, values)


def _described(entries: Entries) -> list[str]:
    """What the header says of each, in the order of the file."""
    ends = list(accumulate(entries.sizes, initial=0))
    words = canonical_json.words(entries.keys)
    return [
        f"{word}:{form.text}{start},{end}]}}"
        for word, form, start, end in zip(words, entries.forms, ends, ends[1:], strict=False)
    ]


def _pieces(part: Part) -> Json:
    return {**part.entries.pieces, **{name: {"alias_of": target} for name, target in part.aliases.items()}}


def entry_cost(key: str, form: Form, piece: Json) -> int:
    """Bytes that an entry takes in the header, at most: what parts are cut by."""
    text = len(f"{canonical_json.word(key)}:{form.text}{10**17},{10**17}]}}".encode())
    said = canonical_json.dumps({key: piece})
    digests = 4 * (dtypes.SIZE * form.blocks // 3 + 1)
    return text + len(_quoted(said.decode()).encode()) + digests + 2


def cost_limit(entries: Entries) -> int:
    """What `entry_cost` of all never exceeds, at once: eight bytes for a character in two places, at most."""
    texts = sum(map(len, entries.keys))
    dimensions = sum([len(form.shape) for form in entries.forms])
    dimensions += sum(len(piece.get("shape", ())) for piece in entries.pieces.values())
    blocks = sum([form.blocks for form in entries.forms])
    return 256 * len(entries) + 8 * texts + 48 * dimensions + 24 * blocks


@dataclass(frozen=True)
class ShardLimits:
    """Bytes of data and of header below which one file stays.

    safetensors refuses headers above 100 MB. An entry that alone reaches `data_bytes` gets a file
    of its own, and part 1 has all values, at most `values_bytes` of them.
    """

    data_bytes: int = 64 << 30
    header_bytes: int = 50_000_000
    values_bytes: int = 1 << 62


DEFAULT_LIMITS = ShardLimits()


def cut(
    identity: ShardIdentity,
    entries: Entries,
    values: Mapping[str, Json],
    aliases: Mapping[str, Key],
    limits: ShardLimits,
    values_text: bytes | None = None,
) -> list[Part]:
    """The parts of a shard, at least one; values lie in part 1, an alias beside its target.

    `values_text` is the canonical JSON of the values, where somebody has made it already.

    Raises BlobError for a key that occurs twice, an alias without target, or values that alone are
    too much for a header.
    """
    by_target = _aliases_by_target(entries, aliases)
    text = canonical_json.dumps(dict(values), within=1) if values_text is None else values_text
    fixed = _fixed_cost(identity, text)
    if fixed >= limits.values_bytes:
        largest = max(values, key=lambda name: len(canonical_json.dumps(values[name])), default=identity.job)
        raise BlobError(
            f"the values of {identity.node} need {fixed} bytes: keep large ones such as {largest} in tensors"
        )
    parts: list[Part] = []
    for chosen in _runs(entries.ordered(), by_target, fixed, fixed - _quoted_bytes(text), limits):
        here = {
            alias: text for text in (chosen.keys if by_target else ()) for alias in by_target.get(text, ())
        }
        first = (values, text) if not parts else ({}, None)
        parts.append(Part(identity, len(parts) + 1, chosen, here, *first))
    return parts


def _runs(
    entries: Entries, by_target: Mapping[str, Sequence[str]], first: int, others: int, limits: ShardLimits
) -> list[Entries]:
    if not by_target and _fit_together(entries, first, limits):
        return [entries]
    begins, data, header = [0], 0, first
    for number, (key, form) in enumerate(zip(entries.keys, entries.forms, strict=True)):
        cost = entry_cost(key, form, entries.pieces.get(key, {}))
        cost += sum(_text_cost(alias, key) for alias in by_target.get(key, ()))
        full = data + form.nbytes >= limits.data_bytes or header + cost >= limits.header_bytes
        if full and number > begins[-1]:
            begins.append(number)
            data, header = 0, others
        data, header = data + form.nbytes, header + cost
    return [entries.among(range(*edges)) for edges in pairwise([*begins, len(entries)])]


def _fit_together(entries: Entries, fixed: int, limits: ShardLimits) -> bool:
    """Whether one file holds all without a closer look."""
    return fixed + cost_limit(entries) < limits.header_bytes and sum(entries.sizes) < limits.data_bytes


def _aliases_by_target(entries: Entries, aliases: Mapping[str, Key]) -> dict[str, list[str]]:
    """The encoded names of tied leaves, by the key that holds their bytes."""
    keys = set(entries.keys)
    if len(keys) != len(entries):
        twice = next(key for key, times in Counter(entries.keys).items() if times > 1)
        raise BlobError(f"{twice} occurs twice in one shard")
    found: dict[str, list[str]] = {}
    for name, target in sorted(aliases.items()):
        alias, text = encode_name(name), format_key(target)
        if text not in keys or alias in keys:
            raise BlobError(f"{name} cannot be an alias of {text} in this shard")
        found.setdefault(text, []).append(alias)
    return found


def _fixed_cost(identity: ShardIdentity, values: bytes) -> int:
    """An upper bound of what a header holds beside its entries."""
    said = canonical_json.dumps([identity.job, identity.node, identity.group, identity.try_name])
    return _quoted_bytes(said) + _quoted_bytes(values) + ALIGNMENT


def _text_cost(alias: str, target: str) -> int:
    return _quoted_bytes(canonical_json.dumps({alias: {"alias_of": target}}))


def _quoted_bytes(text: bytes) -> int:
    """What JSON, which has no control characters, takes within the JSON of the header."""
    return len(text) + text.count(b'"') + text.count(b"\\") + 2
