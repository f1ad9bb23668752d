"""Requests that are wrong, in many ways, of a seed: bytes for a connection, and whether to close it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Made = tuple[bytes, bool]
"""The bytes, and whether this side is closed behind them: nothing more will come."""
_NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1.5,
    2**31,
    2**53,
    2**63,
    2**64,
    1e308,
    10**400,
    None,
    True,
    "1",
    "",
    "\0",
    [],
    {},
)
PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."
NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + PICKLE


def malformed(chance: random.Random, port: int) -> Made:
    """One of them."""
    make: Callable[[random.Random, int], Made] = chance.choice(_KINDS)
    return make(chance, port)


def _request(port: int, body: bytes, kind: str = "application/json", **more: str) -> bytes:
    told = {"Host": f"127.0.0.1:{port}", "Content-Type": kind, "Content-Length": str(len(body)), **more}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in told.items() if value)
    return f"POST /predict HTTP/1.1\r\n{head}\r\n".encode() + body


def _bytes(chance: random.Random, most: int) -> bytes:
    return chance.randbytes(chance.randrange(1, most))


def _garbage(chance: random.Random, port: int) -> Made:
    return _bytes(chance, 400) + b"\r\n\r\n", True


def _bad_head(chance: random.Random, port: int) -> Made:
    heads = (
        b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /predict HTTP/1.1\r\nHost\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"b" * 40_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    )  # fmt: skip
    return chance.choice(heads), True


def _bad_path(chance: random.Random, port: int) -> Made:
    method = chance.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"))
    paths = (
        "/..%2f..%2fetc/passwd",
        "/predict/",
        "//",
        "/%00",
        "/%ff%fe",
        "/?a=%zz",
        "*",
        "/health",
        "/x" * 500,
    )
    return f"{method} {chance.choice(paths)} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(), False


def _bad_chunks(chance: random.Random, port: int) -> Made:
    head = _request(port, b"", Content_Length="", Transfer_Encoding="chunked")
    tails = (
        b"zz\r\n",
        b"5\r\nab\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"-1\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\n",
    )
    return head + chance.choice(tails), True


def _cut_short(chance: random.Random, port: int) -> Made:
    whole = _request(port, json.dumps({"sample": [0.5] * 64}).encode())
    return whole[: chance.randrange(1, len(whole))], True


def _too_long(chance: random.Random, port: int) -> Made:
    size = chance.choice((3 << 20, 17 << 20, 10**12, 10**30))
    return _request(port, b"x", Content_Length=str(size)), False


def _other_type(chance: random.Random, port: int) -> Made:
    kinds = (
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "a/b;;",
        "application/json; charset=utf-16", "application/x-python-pickle", "application/x-npy",
    )  # fmt: skip
    return _request(port, chance.choice((PICKLE, NPY, b"{}")), chance.choice(kinds)), False


def _other_encoding(chance: random.Random, port: int) -> Made:
    return _request(
        port, _bytes(chance, 50), Content_Encoding=chance.choice(("gzip", "br", "deflate"))
    ), False


def _json_bytes(chance: random.Random, port: int) -> Made:
    depth = chance.choice((20, 500, 20_000))
    texts = (
        b"", b"{", b"null", b"[]", b'{"sample"', b'{"sample": NaN}', b'{"sample": -Infinity}',
        b'{"sample": 1, "sample": 2}', b'{"sample": 1, "samples": [1]}', b'{"samples": []}',
        b'{"samples": {}}', b'{"sample": 1e999}',
        b'{"sample": "\\ud800"}', b'{"sample": "' + b"a" * 5000 + b'"}', b"\xff\xfe{}", b"\xef\xbb\xbf{}",
        b'{"sample":' + b"[" * depth, b'{"sample":' + b"[" * depth + b"1" + b"]" * depth + b"}",
        b'{"sample":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}",
        b'{"sample": ' + b"9" * 5000 + b"}", b'{"samples": [' + b"1," * 1000 + b"1]}", _bytes(chance, 300),
    )  # fmt: skip
    return _request(port, chance.choice(texts)), False


def _json_values(chance: random.Random, port: int) -> Made:
    sample: Any = [0.5] * 64
    kind = chance.randrange(6)
    if kind == 0:
        sample[chance.randrange(64)] = chance.choice(_NUMBERS[9:])
    elif kind == 1:
        sample = sample[: chance.randrange(64)]
    elif kind == 2:
        sample = [sample, sample[:3]]
    elif kind == 3:
        sample = {chance.choice(("input", "x", "", "\0")): chance.choice(_NUMBERS), "y": 1}
    elif kind == 4:
        sample = chance.choice(_NUMBERS)
    else:
        sample = [[[sample]]]
    return _request(port, json.dumps({"sample": sample}).encode()), False


def _mutated_json(chance: random.Random, port: int) -> Made:
    text = bytearray(json.dumps({"samples": [[0.5] * 64] * 2}).encode())
    for _ in range(chance.randrange(1, 6)):
        text[chance.randrange(len(text))] = chance.randrange(256)
    return _request(port, bytes(text)), False


def _tensors(chance: random.Random, port: int) -> Made:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1, 64], "data_offsets": [0, 256]}
    key = chance.choice(list(entry))
    wrong = {
        "dtype": ("F99", "F16", "O", None, 7, "BOOL", "F4", "C64"),
        "shape": (
            [64],
            [2, 64],
            [0, 64],
            [-1, 64],
            [2**62, 4],
            [10**30],
            None,
            "x",
            [1.5],
            [1] * 100,
            [True, 64],
        ),
        "data_offsets": ([0, 255], [-1, 255], [256, 0], [0, 2**62], [0], None, [8, 264], ["0", "256"]),
    }[key]
    header = {"x": {**entry, key: chance.choice(wrong)}}
    if chance.random() < 0.3:
        header["y"] = entry
    text = json.dumps(header).encode()
    length = len(text) if chance.random() < 0.8 else chance.choice((0, 1, 2**40, 2**64 - 1, len(text) + 9))
    body = struct.pack("<Q", length) + text + bytes(256) + (b"z" if chance.random() < 0.1 else b"")
    kind = chance.choice(("application/vnd.safetensors", "application/octet-stream"))
    return _request(port, body, kind), False


def _no_tensors(chance: random.Random, port: int) -> Made:
    body = chance.choice((PICKLE, NPY, b"PK\x03\x04" + bytes(60), b"", _bytes(chance, 2000)))
    return _request(port, body, "application/octet-stream"), False


_KINDS = (
    _garbage, _bad_head, _bad_path, _bad_chunks, _cut_short, _too_long, _other_type, _other_encoding,
    _json_bytes, _json_values, _mutated_json, _mutated_json, _tensors, _tensors, _no_tensors,
)  # fmt: skip
