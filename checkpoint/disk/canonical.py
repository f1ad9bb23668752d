"""Canonical JSON: one value, one sequence of bytes, and nothing that two readers read differently.

Keys sorted, no white space, UTF-8, no NaN or infinity, no integer of 2**53 or more (JavaScript and
many tools read those as floats; `values.py` has a tagged form for them), no duplicate key.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torchrelay.errors import DamagedError, UsageError

Json = Any
"""None, bool, int, float, str, list of Json, or dict of str to Json."""

INTEGER_LIMIT = 2**53
DEPTH_LIMIT = 128
"""Containers within containers; above every typed value that `values.encode` produces."""


def dumps(value: Json, *, within: int = 0) -> bytes:
    """Write canonical JSON; raises UsageError for what `loads` would refuse to read back.

    `within` is how many containers the text will lie in.
    """
    many = _check_writable(value, within + 1) > _AT_ONCE
    return (_in_parts(value) if many else _ENCODER.encode(value)).encode("utf-8")


def loads(data: bytes, *, what: str, limit_bytes: int = 64 << 20, depth: int = DEPTH_LIMIT) -> Json:
    """Read JSON from bytes that nobody has proved yet.

    `what` names the bytes in messages. White space around and between tokens is allowed. Raises
    DamagedError for anything that is no JSON or that canonical JSON cannot hold.
    """
    if len(data) > limit_bytes:
        raise DamagedError(f"{what}: {len(data)} bytes of JSON, more than the limit of {limit_bytes}")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise DamagedError(f"{what}: nested deeper than {depth} levels") from None
    except ValueError as error:
        raise DamagedError(f"{what}: {error}") from None
    _check_depth(value, depth, what)
    return value


def object_of(texts: Mapping[str, bytes]) -> bytes:
    """The canonical JSON of an object whose values are canonical already."""
    return b"{%b}" % b",".join(b"%b:%b" % (dumps(key), texts[key]) for key in sorted(texts))


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_AT_ONCE = 4096
"""Values that are written in one call of the encoder, which keeps other threads waiting meanwhile."""
_CHUNK = 256


def _in_parts(value: Json) -> str:
    """The same text, made in steps between which other threads come to run."""
    if type(value) is dict:
        items = sorted(value.items())
        if len(items) > _CHUNK:
            return "{" + ",".join(_ENCODER.encode(dict(part))[1:-1] for part in _chunks(items)) + "}"
        return "{" + ",".join(f"{_ENCODER.encode(key)}:{_in_parts(child)}" for key, child in items) + "}"
    if type(value) in (list, tuple):
        if len(value) > _CHUNK:
            return "[" + ",".join(_ENCODER.encode(part)[1:-1] for part in _chunks(value)) + "]"
        return "[" + ",".join(map(_in_parts, value)) + "]"
    return _ENCODER.encode(value)


def _chunks(items: Sequence[Json]) -> Iterator[Sequence[Json]]:
    return (items[at : at + _CHUNK] for at in range(0, len(items), _CHUNK))


def _check_writable(value: Json, level: int) -> int:
    """Raises for what cannot be written; returns how many values there are."""
    count = 1
    pending: list[tuple[Json, int]] = [(value, level)]
    while pending:
        item, level = pending.pop()
        if level > DEPTH_LIMIT:
            raise UsageError(f"nested deeper than {DEPTH_LIMIT} levels (or a cycle): not canonical JSON")
        kind = type(item)
        if kind is dict:
            count += len(item)
            pending.extend((child, level + 1) for child in item.values())
            _check_keys(item)
        elif kind is list or kind is tuple:
            count += len(item)
            inner = level + 1
            pending.extend([(child, inner) for child in item if not (type(child) is str and child.isascii())])
        else:
            _check_scalar(item)
    return count


def _check_keys(value: dict[Any, Json]) -> None:
    for key in value:
        if type(key) is not str:
            raise UsageError(f"a JSON object has string keys, not {key!r}")
        if not key.isascii():
            _check_scalar(key)


def _check_scalar(item: Json) -> None:
    kind = type(item)
    if item is None or kind is bool:
        return
    if kind is str:
        if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
            raise UsageError(f"{item!r} has a lone surrogate, which UTF-8 cannot hold")
    elif kind is int:
        if abs(item) >= INTEGER_LIMIT:
            raise UsageError(f"an integer of {item.bit_length()} bits is not JSON: use its tagged form")
    elif kind is float:
        if not math.isfinite(item):
            raise UsageError(f"{item} is not JSON: use its tagged form")
    else:
        raise UsageError(f"{kind.__module__}.{kind.__qualname__} is not JSON")


def _check_depth(value: Json, depth: int, what: str) -> None:
    pending = [(value, 1)] if isinstance(value, (dict, list)) else []
    while pending:
        item, level = pending.pop()
        if level > depth:
            raise DamagedError(f"{what}: nested deeper than {depth} levels")
        children = item.values() if isinstance(item, dict) else item
        pending.extend((child, level + 1) for child in children if isinstance(child, (dict, list)))


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return found


def _bounded_int(text: str) -> int:
    # The length first: int() of a very long text is quadratic, and refused from 4301 digits on.
    if len(text) > 17 or abs(number := int(text)) >= INTEGER_LIMIT:
        raise ValueError(f"integer {text[:20]}{'...' if len(text) > 20 else ''} is 2**53 or more")
    return number


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:20]} is out of range")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_bounded_int,
    parse_float=_finite_float,
    parse_constant=_no_constant,
)
