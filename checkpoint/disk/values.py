"""Typed values: what users keep beside tensors, as JSON that gives back the same Python value.

JSON holds None, bool, str, finite floats, lists, integers below 2**53, and dicts with string keys
in ascending order. Everything else takes the tagged form `{"$": kind, "v": content}`:

    int       decimal text                      bytes, bytearray   base64
    float     "inf", "-inf", "nan[:16 hex]"     str                base64 of UTF-16 (lone surrogates)
    complex   [real, imaginary]                 tuple              list
    set, frozenset    list, in the order of the items' JSON
    dict, OrderedDict, Counter    [[key, value], ...] in order
    numpy             [dtype, base64]           ndarray            [dtype, shape, base64]
    torch.dtype, torch.device     text          torch.Size         list
    tensor            what the caller's `tensor` callback said

so `{"$": ...}` as a user's own dict is stored as kind "dict". Nothing here runs code of the value's
class, neither on the way out nor back; subclasses (enums, named tuples) are refused by name.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.canonical import INTEGER_LIMIT, Json
from torchrelay.checkpoint.disk.value_decoding import decode
from torchrelay.errors import BlobError

__all__ = ["decode", "encode"]

TAG = "$"
CONTENT = "v"
LEVELS = 32
"""Containers within containers; three levels of JSON each at most, within canonical.DEPTH_LIMIT."""
ARRAY_LIMIT = 1 << 20
"""Bytes of a numpy array that may lie in JSON; larger ones belong into tensors."""

TensorWriter = Callable[[str, Any], Json]
"""Given the path and a tensor, says what stands for it in the JSON."""

_NAN = struct.pack(">d", math.nan)


def encode(value: Any, path: str, *, tensor: TensorWriter | None = None) -> Json:
    """Turn a value into canonical JSON; `path` names it in messages (`scheduler`).

    Tensors inside are handed to `tensor`; without it they are refused like anything else that is
    not in the table above: BlobError with the path inside the object (`scheduler.a[3].b`), also
    for cycles and for more than 32 levels.
    """
    return _scalar(value) if is_scalar(value) else _Encoder(tensor).encode(value, path)


def is_scalar(value: Any) -> bool:
    """Whether a value consists of no others: always stored, whatever its path, and without a tensor."""
    return type(value) in _SCALARS


def tagged(kind: str, content: Json) -> Json:
    """The tagged form."""
    return {TAG: kind, CONTENT: content}


class _Encoder:
    def __init__(self, tensor: TensorWriter | None) -> None:
        self._tensor = tensor
        self._inside: list[int] = []

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind in _SCALARS:
            return _scalar(value)
        if kind in (list, tuple, set, frozenset, dict, OrderedDict, Counter):
            with self._entered(value, path):
                return self._container(value, path)
        return self._foreign(value, path)

    @contextmanager
    def _entered(self, value: Any, path: str) -> Iterator[None]:
        if id(value) in self._inside:
            raise BlobError(f"{path} contains itself; a value that is stored must be a tree")
        if len(self._inside) >= LEVELS:
            raise BlobError(f"{path} is nested deeper than {LEVELS} levels; store a flatter value")
        self._inside.append(id(value))
        try:
            yield
        finally:
            self._inside.pop()

    def _container(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind in (set, frozenset):
            items = [self.encode(item, f"{path}{{{item!r}}}") for item in value]
            return tagged(kind.__name__, sorted(items, key=canonical.dumps))
        if kind in (list, tuple):
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if kind is list else tagged("tuple", items)
        if kind is dict and _is_plain(value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        return tagged(kind.__name__, [self._pair(key, item, path) for key, item in value.items()])

    def _pair(self, key: Any, item: Any, path: str) -> Json:
        inside = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
        return [self.encode(key, f"the key {key!r} of {path}"), self.encode(item, inside)]

    def _foreign(self, value: Any, path: str) -> Json:
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(value, torch.Tensor) and self._tensor is not None:
                return tagged("tensor", self._tensor(path, value))
            if type(value) is torch.Size:
                return tagged("torch.Size", list(value))
            if type(value) in (torch.dtype, torch.device):
                return tagged(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
        if (numpy := sys.modules.get("numpy")) is not None:
            if isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
                return tagged("numpy", [value.dtype.str, _base64(value.tobytes())])
            if type(value) is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
                return _array(value, path)
        raise BlobError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: "
            "give tensors, numbers, text, bytes or containers of these, or an object with state_dict"
        )


_NUMPY_KINDS = "biufcSUmM"


def _array(value: Any, path: str) -> Json:
    if value.nbytes > ARRAY_LIMIT:
        raise BlobError(
            f"{path} is a numpy array of {value.nbytes} bytes: keep it as a tensor (torch.from_numpy)"
        )
    return tagged("ndarray", [value.dtype.str, list(value.shape), _base64(value.tobytes())])


def _is_plain(value: dict[Any, Any]) -> bool:
    """Whether sorted JSON keeps this dict as it is, its order included."""
    keys = list(value)
    if not all(type(key) is str and type(_str(key)) is str for key in keys) or TAG in value:
        return False
    return keys == sorted(keys)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _int(value: int) -> Json:
    return value if abs(value) < INTEGER_LIMIT else tagged("int", _decimal(value))


def _decimal(value: int) -> str:
    # Hexadecimal beyond what Python converts in linear time (sys.set_int_max_str_digits).
    return str(value) if value.bit_length() < 4096 else hex(value)


def _float(value: float) -> Json:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    nan = "nan" if bits == _NAN else f"nan:{bits.hex()}"
    return tagged("float", nan if math.isnan(value) else repr(value))


def _str(value: str) -> Json:
    if value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    return tagged("str", _base64(value.encode("utf-16-le", "surrogatepass")))


def _scalar(value: Any) -> Json:
    return _SCALARS[type(value)](value)


_SCALARS: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _str,
    int: _int,
    float: _float,
    complex: lambda value: tagged("complex", [_float(value.real), _float(value.imag)]),
    bytes: lambda value: tagged("bytes", _base64(value)),
    bytearray: lambda value: tagged("bytearray", _base64(value)),
}
