"""Typed values back from JSON: the other half of `values.py`, which describes the form."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.errors import DamagedError, FormatError, RelayError

TensorReader = Callable[[Json], Any]
"""Given what stood for a tensor, gives the tensor."""


def decode(json: Json, *, tensor: TensorReader | None = None) -> Any:
    """Give back the value that `values.encode` was given.

    Raises FormatError for a kind that this version does not know, or whose library is not
    installed, and DamagedError for content that no value has.
    """
    try:
        return _decode(json, tensor)
    except RelayError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise DamagedError(f"a stored value is malformed: {error}") from error


def references(json: Json) -> list[str]:
    """The names that stand for tensors in a value, in order."""
    found: list[str] = []
    decode(json, tensor=lambda name: found.append(str(name)))
    return found


def _decode(json: Json, tensor: TensorReader | None) -> Any:
    if isinstance(json, list):
        return [_decode(item, tensor) for item in json]
    if not isinstance(json, dict):
        return json
    if "$" not in json:
        return {key: _decode(item, tensor) for key, item in json.items()}
    kind, content = json["$"], json["v"]
    if kind == "tensor" and tensor is not None:
        return tensor(content)
    if kind in _LEAVES:
        return _LEAVES[kind](content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, tensor) for item in content)
    if kind in _MAPPINGS:
        return _mapping(_MAPPINGS[kind](), content, tensor)
    raise FormatError(f"a stored value is of kind {kind!r}, unknown to this torchrelay: use a newer one")


def _mapping(empty: dict[Any, Any], pairs: Json, tensor: TensorReader | None) -> dict[Any, Any]:
    for key, item in pairs:
        # Not update(): Counter.update would add, and need numbers.
        empty[_decode(key, tensor)] = _decode(item, tensor)
    if len(empty) != len(pairs):
        raise DamagedError("a stored dict has a key twice")
    return empty


def _bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _int(content: str) -> int:
    return int(content, 16) if "x" in content else int(content)


def _float(content: Json) -> float:
    if content == "nan":
        return math.nan
    if isinstance(content, str) and content.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(content[4:]))[0])
    return {"inf": math.inf, "-inf": -math.inf}[content]


def _complex(content: Json) -> complex:
    real, imaginary = (part if isinstance(part, float) else _float(part["v"]) for part in content)
    # Not real + imaginary * 1j, which changes zeros and infinities.
    return complex(real, imaginary)


def _numpy_scalar(content: Json) -> Any:
    dtype, data = content
    return _numpy().frombuffer(_bytes(data), _numpy_dtype(dtype))[0]


def _array(content: Json) -> Any:
    dtype, shape, data = content
    return _numpy().frombuffer(bytearray(_bytes(data)), _numpy_dtype(dtype)).reshape(shape)


def _numpy_dtype(text: str) -> Any:
    dtype = _numpy().dtype(text)
    if dtype.kind not in "biufcSUmM":
        raise DamagedError(f"a stored value has the numpy type {text!r}")
    return dtype


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise FormatError("a stored value is a numpy one: install numpy") from error
    return numpy


def _torch_dtype(content: str) -> Any:
    import torch

    found = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"torch.{content} is no element type")
    return found


def _torch_device(content: str) -> Any:
    import torch

    try:
        return torch.device(content)
    except RuntimeError as error:
        raise DamagedError(f"{content!r} is no device of this torch: {error}") from error


def _torch_size(content: Json) -> Any:
    import torch

    return torch.Size(content)


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "complex": _complex,
    "bytes": _bytes,
    "bytearray": lambda content: bytearray(_bytes(content)),
    "str": lambda content: _bytes(content).decode("utf-16-le", "surrogatepass"),
    "numpy": _numpy_scalar,
    "ndarray": _array,
    "torch.dtype": _torch_dtype,
    "torch.device": _torch_device,
    "torch.Size": _torch_size,
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
