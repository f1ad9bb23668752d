"""Changes of bytes and of JSON, as a fuzzer makes them: from one number, always the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 - 1, 2**53, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e300,
    "", "x", "..", "../../etc/passwd", "/dev/zero", "a\0b", "\u202e", "\ud800", "A" * 5000, "%2e%2e%2f",
    [], {}, [[]], [None], {"": None}, {"x": {}},
)  # fmt: skip
"""What no writer puts there."""
TOKENS: tuple[bytes, ...] = (
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u0000", b"NaN", b"Infinity", b"1e999", b"-0", b"9" * 400,
    b"\xff\xfe", b"\0", b"&a ", b"*a",
    b"<<: ", b"!!python/name:os.system ", b"---\n", b"? ", b"- ", b"\t", b"010",
    b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"../", b"[" * 300, b"{a: " * 50,
)  # fmt: skip
"""What a parser trips over."""


def of_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes of a text."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_CHANGES)(rng, data, others)
    return data


def of_json(rng: random.Random, data: bytes) -> bytes:
    """Apply one to three changes to the parsed JSON and write it again; other bytes stay."""
    try:
        value = json.loads(data)
    except ValueError:
        return data
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_value(rng, value)
    return json.dumps(value, sort_keys=rng.random() < 0.9, separators=(",", ":")).encode()


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(max(len(data), 1))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"\0"


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = _range(rng, data)
    return data[:first] + data[last:]


def _twice(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = _range(rng, data)
    return data[:last] + data[first:last] * rng.choice((1, 2, 50)) + data[last:]


def _token(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = _range(rng, data) if rng.random() < 0.3 else (rng.randrange(len(data) + 1),) * 2
    return data[:first] + rng.choice(TOKENS) + data[last:]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    first, last = _range(rng, other)
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[first:last] + data[at + rng.choice((0, last - first)) :]


def _number(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Eight bytes that a length may be read from."""
    at, number = (
        rng.randrange(len(data) + 1),
        rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data))),
    )
    width = rng.choice((2, 4, 8))
    return data[:at] + (number % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


_CHANGES: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _flip, _cut, _twice, _token, _token, _splice, _number,
)  # fmt: skip


def _range(rng: random.Random, data: bytes) -> tuple[int, int]:
    first = rng.randrange(len(data) + 1)
    return first, min(len(data), first + int(rng.expovariate(1 / 20)))


def _change_value(rng: random.Random, value: Any) -> None:
    places = list(_places(value))
    if not places:
        return
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.5:
        holder[key] = deepcopy(rng.choice(HOSTILE))
    elif what < 0.65:
        del holder[key]
    elif what < 0.8:
        other, at = rng.choice(places)
        holder[key] = deepcopy(other[at]) if _has(other, at) else None
    elif isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] += rng.choice((-1, 1, 4096, -4096, 2**40))
    elif isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = holder[key]


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key or index in it."""
    todo = [value]
    while todo:
        one = todo.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            yield one, key
            todo.append(one[key])
