"""Read and write canonical JSON (one value, one sequence of bytes), sealed files and version stamps.

Canonical: keys sorted, no white space, UTF-8, no NaN or infinity, no integer of 2**53 or more (JavaScript and
many tools read those as floats; `values.py` has a tagged form for them), no duplicate key.

Field readers take an object and a key and raise DamagedError, naming file and field, for a value of another
type. `bool` does not count as an integer.

The digest of a sealed file covers the exact bytes between its fixed head and tail, so that a changed byte is
detected before anything is parsed.

Stamps are `{"major": 1, "minor": 0, "features": []}`. Another major version or an unknown feature raises. A
higher minor version only adds keys, which are kept and ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from json.encoder import encode_basestring
from typing import NoReturn, TypeVar

from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.records import Json, dataclass

INTEGER_LIMIT = 2**53
_SHALLOW = 6
DEPTH_LIMIT = 128
"""Maximum nesting; larger than that of any typed value of `values.encode`."""


def dumps(value: Json, *, within: int = 0) -> bytes:
    """Write canonical JSON within `within` containers; raises UsageError for what `loads` would refuse."""
    # Raise UsageError for values that JSON cannot hold; returns their number.
    count = 0
    for level, (items, kinds) in enumerate(_layers(value), within + 1):
        if level > DEPTH_LIMIT:
            raise UsageError(f"nested deeper than {DEPTH_LIMIT} levels (or a cycle): not canonical JSON")
        count += len(items)
        if unknown := kinds - _KINDS:
            kind = unknown.pop()
            raise UsageError(f"{kind.__module__}.{kind.__qualname__} is not JSON")
        if int in kinds and (number := _too_large(items, kinds)) is not None:
            raise UsageError(f"an integer of {number.bit_length()} bits is not JSON: use its tagged form")
        if float in kinds and (wrong := _not_finite(items)) is not None:
            raise UsageError(f"{wrong} is not JSON: use its tagged form")
        if dict in kinds:
            keys = chain.from_iterable(item for item in items if type(item) is dict)
            for key in keys:
                if type(key) is not str:
                    raise UsageError(f"a JSON object has string keys, not {key!r}")
    many = count > _AT_ONCE
    text = _in_parts(value) if many else _ENCODER.encode(value)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{_lone_surrogate(value)} has a lone surrogate, which UTF-8 cannot hold") from None


def loads(
    data: bytes | str,
    *,
    what: str,
    limit_bytes: int = 64 << 20,
    depth: int = DEPTH_LIMIT,
    again: bool = False,
) -> Json:
    """Read JSON from unverified bytes, or from text that UTF-8 can hold.

    `what` names the bytes in messages. White space between tokens is allowed. Raises DamagedError for invalid
    JSON and for values that canonical JSON cannot hold. `again`: these bytes were read before, so duplicate
    keys, integers of 2**53 and more, numbers out of range, depth and lone surrogates are not checked.
    """
    if len(data) > limit_bytes:
        raise DamagedError(f"{what}: {len(data)} bytes of JSON, more than the limit of {limit_bytes}")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = (_AGAIN if again else _DECODER).decode(text)
    except RecursionError:
        raise DamagedError(f"{what}: nested deeper than {depth} levels") from None
    except ValueError as error:
        raise DamagedError(f"{what}: {error}") from None
    if again:
        return value
    for level, (items, kinds) in enumerate(_layers(value), 1):
        if level > depth and kinds & _CONTAINERS:
            raise DamagedError(f"{what}: nested deeper than {depth} levels")
        if int in kinds and _too_large(items, kinds) is not None:
            raise DamagedError(f"{what}: an integer is 2**53 or more")
        if float in kinds and _not_finite(items) is not None:
            raise DamagedError(f"{what}: a number is out of range")
    if "\\" in text and _SURROGATE.search(text) and (place := _lone_surrogate(value)):
        raise DamagedError(f"{what}: {place} has a lone surrogate, which UTF-8 cannot hold")
    return value


def text_at(text: str, at: int) -> tuple[str, int]:
    """The JSON string that begins at a position, and its end; raises ValueError without one."""
    if not text.startswith('"', at):
        raise ValueError("no string")
    found, end = _AGAIN.raw_decode(text, at)
    if not found.isascii():
        found.encode("utf-8")  # an escape may stand for half a character
    return found, end


def dumps_read(value: Json) -> bytes:
    """`dumps` without checks, for values from `loads` or small numbers."""
    return _ENCODER.encode(value).encode("utf-8")


def words(texts: Iterable[str]) -> list[str]:
    """The canonical JSON of strings; raises UsageError as `dumps` does."""
    found = list(map(encode_basestring, texts))
    try:
        "".join(found).encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{_lone_surrogate(found)} has a lone surrogate, which UTF-8 cannot hold") from None
    return found


def object_of(texts: Mapping[str, bytes]) -> bytes:
    """The canonical JSON of an object whose values are canonical JSON already."""
    return b"{%b}" % b",".join(b"%b:%b" % (dumps(key), texts[key]) for key in sorted(texts))


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_AT_ONCE = 4096
"""Maximum of values per call of the encoder, which holds the GIL."""
_CHUNK = 256


def _in_parts(value: Json) -> str:
    """Encode a large value in steps, between which other threads can run."""
    if type(value) not in _CONTAINERS:
        return _ENCODER.encode(value)
    mapping = type(value) is dict
    items: Sequence[Json] = sorted(value.items()) if mapping else value
    if len(items) > _CHUNK:
        chunks = (items[at : at + _CHUNK] for at in range(0, len(items), _CHUNK))
        parts = [_ENCODER.encode(dict(part) if mapping else part)[1:-1] for part in chunks]
    elif mapping:
        parts = [f"{_ENCODER.encode(key)}:{_in_parts(child)}" for key, child in items]
    else:
        parts = list(map(_in_parts, items))
    return f"{{{','.join(parts)}}}" if mapping else f"[{','.join(parts)}]"


def _layers(value: Json) -> Iterator[tuple[list[Json], set[type]]]:
    """All items and their types, level by level; deep containers that occur twice are visited once."""
    items, kinds, level = [value], {type(value)}, 1
    while items:
        yield items, kinds
        if not kinds & _CONTAINERS:
            return
        inner = items if kinds <= _CONTAINERS else [item for item in items if type(item) in _CONTAINERS]
        if level > _SHALLOW:
            inner = list({id(item): item for item in inner}.values())
        within = inner if dict not in kinds else [i.values() if type(i) is dict else i for i in inner]
        items = list(chain.from_iterable(within))
        kinds = set(map(type, items))
        level += 1


def _too_large(items: list[Json], kinds: set[type]) -> int | None:
    limit = INTEGER_LIMIT
    numbers = items if kinds == {int} else [item for item in items if type(item) is int]
    if -limit < min(numbers, default=0) and max(numbers, default=0) < limit:
        return None
    return next(number for number in numbers if not -limit < number < limit)


def _not_finite(items: list[Json]) -> float | None:
    return next((item for item in items if type(item) is float and not math.isfinite(item)), None)


def _lone_surrogate(value: Json) -> str:
    """Where the text of a value has a lone surrogate, or empty."""
    text = _ENCODER.encode(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return repr(text[max(0, error.start - 20) : error.end])
    return ""


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_CONTAINERS = frozenset({dict, list, tuple})
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may stand for half a character; UTF-8 itself has none."""
_KINDS = _CONTAINERS | {type(None), bool, int, float, str}
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_AGAIN = json.JSONDecoder(parse_constant=_no_constant)


T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """One JSON object, and its name for errors."""

    values: Mapping[str, Json]
    what: str

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """A whole number of at least `minimum`."""
        value = self.values.get(key)
        if type(value) is not int or value < minimum:
            raise self.wrong(key)
        return value

    def text(self, key: str) -> str:
        """A string."""
        return self._of(key, str)

    def flag(self, key: str) -> bool:
        """A boolean."""
        return self._of(key, bool)

    def items(self, key: str) -> list[Json]:
        """A list."""
        return self._of(key, list)

    def _of(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if not isinstance(value, kind):
            raise self.wrong(key)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key)
        return tuple(values)

    def fields(self, key: str) -> Fields:
        """An object inside this one."""
        return self._inner(self.values.get(key), key)

    def each(self, key: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        """A list of objects, each converted by `read`."""
        return tuple(read(self._inner(value, key)) for value in self.items(key))

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """None if the field is null, else `read(key)`; an absent field raises."""
        if key not in self.values:
            raise self.wrong(key)
        return None if self.values[key] is None else read(key)

    def rest(self, known: frozenset[str]) -> dict[str, Json]:
        """The fields unknown to this version; they are kept when the object is written again."""
        return {key: value for key, value in self.values.items() if key not in known}

    def wrong(self, key: str) -> DamagedError:
        """The error for a field that is absent or invalid."""
        return DamagedError(f"{self.what} is damaged: {key!r} is {self.values.get(key)!r:.80}")

    def _inner(self, value: Json, key: str) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(key)
        return Fields(value, f"{self.what} ({key})")


LIMIT_BYTES = 16 * 2**20
"""More than any log record needs (64 entries, some branches and marks)."""
DEPTH = 32
_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"}')
_TAIL_BYTES = len(b',"sha256":""}') + 64
_HEAD_BYTES = len(b'{"":')


def seal(key: str, value: Json) -> bytes:
    """Canonical JSON of `value` under `key` with its SHA-256; raises UsageError for too many bytes."""
    body = dumps(value)
    if len(body) > LIMIT_BYTES - len(key) - _TAIL_BYTES - _HEAD_BYTES:
        raise UsageError(f"the {key} would take {len(body)} bytes, more than the {LIMIT_BYTES} of its file")
    return b'{"%b":%b,"sha256":"%b"}' % (key.encode(), body, sha256(body).encode())


def sealed_bytes(storage: Storage, path: str) -> bytes:
    """The bytes of a sealed file, up to one byte more than the limit."""
    return storage.read_range(path, 0, LIMIT_BYTES + 1)


def read_sealed(key: str, read: Callable[[], bytes]) -> bytes:
    """The result of `read`; bytes that fail the seal are read again: damage counts when seen twice."""
    data = read()
    try:
        _body(key, data, "")
    except DamagedError:
        return read()
    return data


def unseal(key: str, data: bytes, what: str) -> dict[str, Json]:
    """The object under `key`; raises DamagedError, naming `what`, unless every byte is as sealed."""
    body = _body(key, data, what)
    value = loads(body, what=what, limit_bytes=LIMIT_BYTES, depth=DEPTH)
    if not isinstance(value, dict):
        raise DamagedError(f"{what} is damaged: its {key} is not an object")
    return value


def _body(key: str, data: bytes, what: str) -> bytes:
    head = b'{"%b":' % key.encode()
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    body = data[len(head) : -_TAIL_BYTES]
    if not data.startswith(head) or tail is None or len(data) < len(head) + _TAIL_BYTES:
        raise DamagedError(f"{what} is damaged: it is truncated or not a sealed {key}")
    if sha256(body) != tail[1].decode():
        raise DamagedError(f"{what} is damaged: its bytes do not have the SHA-256 that it states")
    return body


MAJOR = 1
MINOR = 0
PLACES = "places"
"""In manifests of positions with a step: a reader that ignores the nodes' places would resume wrongly."""
GRADIENTS = "gradients"
"""In manifests with gradients of an open window: a reader that ignores them would resume wrongly."""
FEATURES: frozenset[str] = frozenset({PLACES, GRADIENTS})


def stamp(features: Iterable[str] = ()) -> Json:
    """The stamp for a file that needs these features to be read."""
    return {"major": MAJOR, "minor": MINOR, "features": sorted(features)}


def check_stamp(found: Json, *, what: str) -> None:
    """Raise FormatError for a stamp that this version cannot read, DamagedError for an invalid one."""
    if not isinstance(found, dict):
        raise DamagedError(f"{what}: no format version")
    major, minor, features = found.get("major"), found.get("minor"), found.get("features")
    named = isinstance(features, list) and all(isinstance(name, str) for name in features)
    if type(major) is not int or type(minor) is not int or not named:
        raise DamagedError(f"{what}: invalid format version: {found!r}")
    remedy = "use the version that wrote it, or a newer one"
    if major != MAJOR:
        raise FormatError(
            f"{what} has format version {major}.{minor}; this torchrelay reads {MAJOR}.x: {remedy}"
        )
    if unknown := sorted(set(features or ()) - FEATURES):
        raise FormatError(f"{what} needs {', '.join(unknown)}, which this torchrelay does not know: {remedy}")
