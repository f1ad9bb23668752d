"""Write and parse the header of a shard file: entries and their places.

    8 bytes  length of the header, little-endian
    header   JSON as safetensors defines it, padded with spaces so that the data start at a multiple of 4096;
        `__metadata__["torchrelay"]` is one JSON text (see `HeaderFrame`)
    data     the bytes of all entries, item size descending, then key; no gap between them

The length of the header follows from the plan alone, because digests have a fixed width: a writer reserves
its place, writes the data, and fills the header in last.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate, pairwise

from torchrelay.checkpoint.format import canonical_json, dtypes, names
from torchrelay.checkpoint.format import dtypes as digest
from torchrelay.checkpoint.format.names import Key, encode_name, format_key
from torchrelay.checkpoint.format.position import MAX_EPOCH, Position
from torchrelay.checkpoint.format.shard.entries import (
    METADATA_KEY,
    Entries,
    EntryForm,
    StoredColumns,
    StoredEntries,
    StoredEntry,
    are_counts,
    metadata_with_rows,
    too_large,
    written_header,
)
from torchrelay.errors import BlobError, DamagedError, FormatError, UsageError
from torchrelay.records import Json, dataclass

ALIGNMENT = 4096
_quoted = json.JSONEncoder(ensure_ascii=False).encode
"""A text as JSON; JSON within JSON is quoted twice."""


@dataclass(frozen=True)
class ShardIdentity:
    """Identity of a shard: the job's name, the position, the node, the group and the attempt."""

    job: str
    position: Position
    node: str
    group: str
    attempt_name: str


@dataclass(frozen=True)
class ShardPart:
    """The content of one file: entries in stored order, aliases (name to key), values on part 1."""

    identity: ShardIdentity
    number: int
    entries: Entries
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    values_text: bytes | None = field(default=None, compare=False, repr=False)
    """The canonical JSON of `values`, if already made."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(self.entries.sizes)


class HeaderFrame:
    """The header of a part without its digests, which are known when the data are written.

    The metadata's JSON has format, job, position, node, group, try, part, digest, block, values (typed),
    digests (base64 in key order), and pieces. A piece is `{"dtype", "shape"}` for a key whose logical dtype
    or leaf shape is not that of the entry, and `{"alias_of"}` for a name stored under another key.
    """

    def __init__(self, part: ShardPart) -> None:
        identity, entries, values = part.identity, part.entries, part.values_text
        said = {
            "format": canonical_json.stamp(),
            "job": identity.job,
            "position": [identity.position.epoch, identity.position.step],
            "node": identity.node,
            "group": identity.group,
            "try": identity.attempt_name,
            "part": part.number,
            "digest": dtypes.NAME,
            "block": dtypes.BLOCK,
            "digests": "",
            "pieces": {**entries.pieces, **{name: {"alias_of": key} for name, key in part.aliases.items()}},
        }
        text = canonical_json.dumps(said)[:-1].decode()
        if values is None:
            values = canonical_json.dumps(dict(part.values), within=1)
        metadata = _quoted(f'{text},"values":{values.decode()}}}')  # with the values last
        # Only `block` and `digest` sort before `digests`: the first match is the right one.
        head, place, tail = metadata.partition(_quoted('"digests":"')[1:-1])
        self._head = f'{{"__metadata__":{{"{METADATA_KEY}": {head}{place}'.encode()
        ends = list(accumulate(entries.sizes, initial=0))
        words = canonical_json.words(entries.keys)
        described = [
            f"{word}:{form.text}{start},{end}]}}"
            for word, form, start, end in zip(words, entries.forms, ends, ends[1:], strict=False)
        ]
        self._tail = (",".join([f"{tail}}}", *described]) + "}").encode()
        self.data_bytes = part.data_bytes
        self.digest_bytes = dtypes.SIZE * sum([form.blocks for form in entries.forms])
        length = 8 + len(self._head) + 4 * -(-self.digest_bytes // 3) + len(self._tail)
        self.nbytes = length + -length % ALIGNMENT

    def filled(self, digests: bytes) -> bytes:
        """All bytes before the data."""
        text = self._head + base64.b64encode(digests) + self._tail
        return (self.nbytes - 8).to_bytes(8, "little") + text.ljust(self.nbytes - 8)


def entry_cost(key: str, form: EntryForm, piece: Json) -> int:
    """Upper bound of the bytes that an entry takes in the header, by which parts are cut."""
    text = len(f"{_quoted(key)}:{form.text}{10**17},{10**17}]}}".encode())
    said = canonical_json.dumps({key: piece})
    digests = 4 * (dtypes.SIZE * form.blocks // 3 + 1)
    return text + len(_quoted(said.decode()).encode()) + digests + 2


def cost_limit(entries: Entries) -> int:
    """Upper bound of `entry_cost` of all at once: at most eight bytes for a character in two places."""
    texts = sum(map(len, entries.keys))
    dimensions = sum([len(form.shape) for form in entries.forms])
    dimensions += sum(len(piece.get("shape", ())) for piece in entries.pieces.values())
    blocks = sum([form.blocks for form in entries.forms])
    return 256 * len(entries) + 8 * texts + 48 * dimensions + 24 * blocks


@dataclass(frozen=True)
class ShardLimits:
    """Maximum bytes of data and of header of one file.

    safetensors refuses headers above 100 MB. An entry that alone reaches `data_bytes` gets its own file, and
    part 1 has all values, at most `values_bytes` of them.
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
) -> list[ShardPart]:
    """The parts of a shard, at least one; values are in part 1, an alias is beside its target.

    `values_text` is the canonical JSON of the values, if already made. Raises BlobError for a key that occurs
    twice, an alias without target, or values that are too large for a header.
    """
    # The encoded names of tied leaves, by the key that holds their bytes.
    keys = set(entries.keys)
    if len(keys) != len(entries):
        twice = next(key for key, times in Counter(entries.keys).items() if times > 1)
        raise BlobError(f"{twice} occurs twice in one shard")
    by_target: dict[str, list[str]] = {}
    for name, target in sorted(aliases.items()):
        alias, key = encode_name(name), format_key(target)
        if key not in keys or alias in keys:
            raise BlobError(f"{name} cannot be an alias of {key} in this shard")
        by_target.setdefault(key, []).append(alias)
    text = canonical_json.dumps(dict(values), within=1) if values_text is None else values_text
    said = canonical_json.dumps([identity.job, identity.node, identity.group, identity.attempt_name])
    fixed = _quoted_bytes(said) + _quoted_bytes(text) + ALIGNMENT  # at least the bytes beside the entries
    if fixed >= limits.values_bytes:
        largest = max(values, key=lambda name: len(canonical_json.dumps(values[name])), default=identity.job)
        raise BlobError(
            f"the values of {identity.node} need {fixed} bytes: keep large ones such as {largest} in tensors"
        )
    parts: list[ShardPart] = []
    for chosen in _runs(entries.ordered(), by_target, fixed, fixed - _quoted_bytes(text), limits):
        here = {alias: key for key in by_target.keys() & chosen.keys for alias in by_target[key]}
        first = (values, text) if not parts else ({}, None)
        parts.append(ShardPart(identity, len(parts) + 1, chosen, here, *first))
    return parts


def _runs(
    entries: Entries, by_target: Mapping[str, Sequence[str]], first: int, others: int, limits: ShardLimits
) -> list[Entries]:
    few = first + cost_limit(entries) < limits.header_bytes
    if few and not by_target and sum(entries.sizes) < limits.data_bytes:
        return [entries]
    begins, data, header = [0], 0, first
    for number, (key, form) in enumerate(zip(entries.keys, entries.forms, strict=True)):
        cost = entry_cost(key, form, entries.pieces.get(key, {}))
        aliases = (canonical_json.dumps({alias: {"alias_of": key}}) for alias in by_target.get(key, ()))
        cost += sum(map(_quoted_bytes, aliases))
        full = data + form.nbytes >= limits.data_bytes or header + cost >= limits.header_bytes
        if full and number > begins[-1]:
            begins.append(number)
            data, header = 0, others
        data, header = data + form.nbytes, header + cost
    return [entries.among(range(*edges)) for edges in pairwise([*begins, len(entries)])]


def _quoted_bytes(text: bytes) -> int:
    """Size of JSON, which has no control characters, within the JSON of the header."""
    return len(text) + text.count(b'"') + text.count(b"\\") + 2


LENGTH_LIMIT = 100_000_000
"""Limit for headers without a manifest, as in blob files; also that of safetensors."""
_RESERVED = ("encryption", "codec", "stored_bytes")


@dataclass(frozen=True)
class ShardContent:
    """Content of a header: the file's identity, and the place of everything in it."""

    identity: ShardIdentity
    part: int
    entries: StoredEntries
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    data_start: int
    file_bytes: int


def header_length(prefix: bytes, file_bytes: int, *, what: str) -> int:
    """Bytes before the data, from the first 8 bytes of the file; raises DamagedError if it cannot be."""
    if len(prefix) < 8:
        raise DamagedError(f"{what}: {len(prefix)} bytes are too few for a shard")
    total = 8 + int.from_bytes(prefix[:8], "little")
    if not 10 <= total <= file_bytes or total % ALIGNMENT:
        raise DamagedError(f"{what}: the header cannot be {total - 8} bytes long in a file of {file_bytes}")
    return total


def parse(header: bytes, file_bytes: int, *, what: str, vouched: bool = False) -> ShardContent:
    """Parse all bytes before the data; raises DamagedError, or FormatError for another version.

    `vouched`: these bytes were parsed before. They are then read `again` (see `canonical_json.loads`), and
    entries of a special form are parsed on demand.
    """
    if header_length(header, file_bytes, what=what) != len(header):
        raise DamagedError(f"{what}: the header is not {len(header)} bytes long")
    data = range(len(header), file_bytes)
    written = written_header(header, len(data))
    text, said = (written[0], None) if written else _decoded(header, what, vouched)
    inner = metadata_with_rows(text) or canonical_json.loads(
        text, what=f"{what}: metadata", limit_bytes=len(text), again=vouched
    )
    if not isinstance(inner, dict):
        raise DamagedError(f"{what}: the metadata are not a JSON object")
    canonical_json.check_stamp(inner.get("format"), what=what)
    if inner.get("digest") != digest.NAME or inner.get("block") != digest.BLOCK or "encryption" in inner:
        raise FormatError(
            f"{what} has digests or an encryption that this torchrelay does not know: use a newer one"
        )
    try:
        inner["digests"] = base64.b64decode(str(inner.get("digests")), validate=True)
    except (binascii.Error, ValueError):
        raise DamagedError(f"{what}: the digests are not base64") from None
    pieces, digests = _pieces(inner, what), inner["digests"]
    if written and written[2].blocks[-1] * digest.SIZE == len(digests):
        columns = replace(written[2], digests=digests, data_start=data.start)
        entries = _entries(written[1], pieces, columns, what)
    else:
        said = _decoded(header, what, vouched)[1] if said is None else said
        known = _one_by_one(said, pieces, digests, data, what)
        entries = StoredEntries({key: number for number, key in enumerate(known)}, known)
    if not vouched:
        entries.look_at_all()
    identity, part = _identity(inner, what), inner.get("part")
    if type(part) is not int or part < 1:
        raise DamagedError(f"{what}: the metadata have no part")
    aliases: dict[str, str] = {}
    for text in (text for text in pieces if text not in entries):
        target = pieces[text].get("alias_of")
        if not isinstance(target, str) or target not in entries:
            raise DamagedError(f"{what}: {text} has neither bytes nor an alias that has")
        key = names.parse_key(text)
        if not isinstance(key, names.Whole):
            raise DamagedError(f"{what}: {text} is a piece and cannot be an alias")
        aliases[key.name] = target
    if not isinstance(values := inner.get("values"), dict):
        raise DamagedError(f"{what}: the metadata have no values")
    return ShardContent(identity, part, entries, aliases, values, len(header), file_bytes)


def _decoded(header: bytes, what: str, vouched: bool) -> tuple[str, dict[str, Json]]:
    """The metadata and the entries of any other header."""
    said = canonical_json.loads(header[8:], what=f"{what}: header", limit_bytes=len(header), again=vouched)
    if not isinstance(said, dict):
        raise DamagedError(f"{what}: the header is not a JSON object")
    outer = said.pop("__metadata__", None)
    text = outer.get(METADATA_KEY) if isinstance(outer, dict) else None
    if not isinstance(text, str):
        raise FormatError(f"{what} was not written by torchrelay: its metadata do not mention it")
    return text, said


def _identity(inner: dict[str, Json], what: str) -> ShardIdentity:
    place = _pair(inner.get("position"))
    if place is None or place[0] > MAX_EPOCH:
        raise DamagedError(f"{what}: invalid position {inner.get('position')!r}")
    try:
        node = names.check_node(_text(inner, "node", what))
        group = names.check_group(_text(inner, "group", what))
    except UsageError as error:
        raise DamagedError(f"{what}: {error}") from None
    return ShardIdentity(_text(inner, "job", what), Position(*place), node, group, _text(inner, "try", what))


def _text(inner: dict[str, Json], field: str, what: str) -> str:
    found = inner.get(field)
    if not isinstance(found, str):
        raise DamagedError(f"{what}: the metadata have no {field}")
    return found


def _pair(value: Json) -> tuple[int, int] | None:
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 and are_counts(value) else None


def _pieces(inner: dict[str, Json], what: str) -> dict[str, dict[str, Json]]:
    found = inner.get("pieces")
    if not isinstance(found, dict) or not all(isinstance(piece, dict) for piece in found.values()):
        raise DamagedError(f"{what}: the metadata have no pieces")
    for key, piece in found.items():
        if unread := [name for name in _RESERVED if name in piece]:
            raise FormatError(f"{what}: {key} has a {unread[0]}, unknown to this torchrelay: use a newer one")
    return found


def _entries(
    numbers: dict[str, int], pieces: dict[str, dict[str, Json]], stored: StoredColumns, what: str
) -> StoredEntries:
    """All entries; those of a special form are parsed on demand."""
    looked_at: dict[tuple[object, ...], tuple[dtypes.ElementType, tuple[int, ...]]] = {}

    def look(number: int, text: str) -> StoredEntry:
        key, piece, form = names.parse_key(text), pieces.get(text, {}), stored.forms[number]
        # All that decides except the name; as text, because 1, 1.0 and True are equal.
        alike = (form.dtype, form.shape, text.partition("@")[2], repr(piece))
        if alike not in looked_at:
            leaf = f"{what}: {text}"
            # Not the decoded header's own, which can then be freed.
            entry = {"dtype": dtypes.by_name(form.dtype).code, "shape": list(form.shape)}
            kind, shape = _logical(key, entry, piece, leaf)
            _check_stored(stored.entry(number, key, kind, shape), entry, leaf)
            looked_at[alike] = kind, shape
        return stored.entry(number, key, *looked_at[alike])

    others = [key for key in numbers if key not in pieces] if pieces else list(numbers)
    plain = names.all_plain(others)
    odd = pieces.keys() if plain else {*pieces, *(key for key in others if not names.is_plain(key))}
    return StoredEntries(numbers, {}, stored, odd, look)


def _one_by_one(
    said: dict[str, Json], pieces: dict[str, dict[str, Json]], digests: bytes, data: range, what: str
) -> dict[str, StoredEntry]:
    """The same checks in file order: finds the error and its place."""
    entries: dict[str, StoredEntry] = {}
    end, block = data.start, 0
    for text, entry in said.items():
        leaf = f"{what}: {text}"
        key = names.parse_key(text)
        kind, shape = _logical(key, entry, pieces.get(text, {}), leaf)
        offsets, expected = _pair(entry.get("data_offsets")), end - data.start
        if offsets is None:
            raise DamagedError(f"{leaf} has no offsets")
        begin, stop = offsets
        if begin != expected or stop < begin:
            raise DamagedError(f"{leaf}: bytes {begin} to {stop}, not from {expected}: a hole or an overlap")
        stop += data.start
        blocks = digest.block_count(stop - end)
        own = digests[block * digest.SIZE : (block + blocks) * digest.SIZE]
        entries[text] = StoredEntry(key, kind, shape, end, stop, own)
        _check_stored(entries[text], entry, leaf)
        end, block = stop, block + blocks
    if end != data.stop:
        raise DamagedError(f"{what}: the entries end at byte {end}, the file at {data.stop}")
    if len(digests) != block * digest.SIZE:
        raise DamagedError(f"{what}: {len(digests)} bytes of digests for {block} blocks")
    return entries


def _logical(
    key: Key, entry: Json, piece: dict[str, Json], leaf: str
) -> tuple[dtypes.ElementType, tuple[int, ...]]:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise DamagedError(f"{leaf} has no type")
    stored = dtypes.by_code(entry["dtype"])
    kind = dtypes.by_name(str(piece["dtype"])) if "dtype" in piece else stored
    if kind.code != stored.code:
        raise DamagedError(f"{leaf}: {kind.name} is not stored as {stored.code}")
    if "alias_of" in piece or ("shape" not in piece and (kind.raw or not isinstance(key, names.Whole))):
        raise DamagedError(f"{leaf}: its piece is not described")
    shape = piece.get("shape", entry.get("shape"))
    if not isinstance(shape, list) or not are_counts(shape):
        raise DamagedError(f"{leaf}: invalid shape {shape!r}")
    if too_large(shape):
        raise DamagedError(f"{leaf}: shape {shape!r} is too large")
    return kind, tuple(shape)


def _check_stored(entry: StoredEntry, said: dict[str, Json], leaf: str) -> None:
    try:
        shape = entry.piece_shape
    except BlobError as error:
        raise DamagedError(f"{leaf}: {error}") from None
    if said.get("shape") != list(entry.dtype.stored_shape(shape)):
        raise DamagedError(f"{leaf}: stored with shape {said.get('shape')!r}, described as {list(shape)}")
    if entry.dtype.nbytes(shape) != entry.nbytes:
        raise DamagedError(f"{leaf}: {entry.nbytes} bytes for {entry.dtype.name} of shape {list(shape)}")
