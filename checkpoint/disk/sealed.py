"""Small JSON files that carry the digest of their own bytes: `{"<key>":{...},"sha256":"..."}`.

The digest is that of the bytes between the fixed head and the fixed tail, exactly as they lie
there, so that every changed byte of the file shows before any of it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, UsageError

Json = Any

LIMIT_BYTES = 16 * 2**20
"""More than any log record can need (64 entries, some branches and marks)."""
DEPTH = 32
_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"}')
_TAIL_BYTES = len(b',"sha256":""}') + 64
_HEAD_BYTES = len(b'{"":')


def seal(key: str, value: Json) -> bytes:
    """Canonical JSON of `value` under `key`, followed by the SHA-256 of that JSON.

    Raises UsageError for more than `sealed_bytes` reads.
    """
    body = canonical.dumps(value)
    if len(body) > LIMIT_BYTES - len(key) - _TAIL_BYTES - _HEAD_BYTES:
        raise UsageError(f"the {key} would take {len(body)} bytes, more than the {LIMIT_BYTES} of its file")
    return b'{"%b":%b,"sha256":"%b"}' % (key.encode(), body, canonical.sha256(body).encode())


def sealed_bytes(storage: Storage, path: str) -> bytes:
    """The bytes of a sealed file; one byte more than any may have shows that it is none."""
    return storage.read_range(path, 0, LIMIT_BYTES + 1)


def read_sealed(key: str, read: Callable[[], bytes]) -> bytes:
    """What `read` gives; bytes that are not as sealed are read again, for damage is believed when seen twice.

    Whoever appends to a log stands on its newest record: half an answer of a store must not move that.
    """
    data = read()
    try:
        _body(key, data, "")
    except DamagedError:
        return read()
    return data


def unseal(key: str, data: bytes, what: str) -> dict[str, Json]:
    """The object under `key`; raises DamagedError, naming `what`, unless every byte is as sealed."""
    body = _body(key, data, what)
    value = canonical.loads(body, what=what, limit_bytes=LIMIT_BYTES, depth=DEPTH)
    if not isinstance(value, dict):
        raise DamagedError(f"{what} is damaged: its {key} is no object")
    return value


def _body(key: str, data: bytes, what: str) -> bytes:
    head = b'{"%b":' % key.encode()
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    body = data[len(head) : -_TAIL_BYTES]
    if not data.startswith(head) or tail is None or len(data) < len(head) + _TAIL_BYTES:
        raise DamagedError(f"{what} is damaged: it is cut short or no sealed {key}")
    if canonical.sha256(body) != tail[1].decode():
        raise DamagedError(f"{what} is damaged: its bytes do not have the SHA-256 that it states")
    return body
