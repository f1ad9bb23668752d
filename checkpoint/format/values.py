"""Encode Python values beside tensors as JSON that decodes to the same values.

JSON holds None, bool, str, finite floats, lists, integers below 2**53, and dicts with string keys in
ascending order. All else takes the tagged form `{"$": kind, "v": content}`:

- int: decimal text
- bytes, bytearray: base64
- float: "inf", "-inf", "nan[:16 hex]"
- str: base64 of UTF-16 (lone surrogates)
- complex: [real, imaginary]
- tuple: list
- set, frozenset: list, in the order of the items' JSON
- dict, OrderedDict, Counter: [[key, value], ...] in order
- numpy: [dtype, base64]
- ndarray: [dtype, shape, base64]
- torch.dtype, torch.device: text
- torch.Size: list
- tensor, parameter: result of the caller's `tensor` callback
- array: [dtype, shape, result of the caller's `memory` callback]
- numbers: ["list" or "tuple", result of the caller's `memory` callback]
- ordered: [dimensions from the outermost in memory, an array]
- blob: result of the caller's `blob` callback
- deque: [maxlen or null, list]
- defaultdict: [name of the factory or null, [[key, value], ...]]
- dataclass: [qualified name, [[field, value], ...]]
- torch.Generator: [device, base64]
- numpy.Generator: [bit generator, state, seed sequence or null]
- numpy.RandomState: state
- random.Random: [version, base64 of 32-bit words, gauss]

States are plain numbers and bytes. A user's dict `{"$": ...}` is stored as kind "dict". No code of the
value's class is called; subclasses (enums, named tuples) raise with their name.
Scalars of one container are encoded by one built-in function each, because there may be millions.
"""

from __future__ import annotations

import base64
import math
import random
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import INTEGER_LIMIT
from torchrelay.checkpoint.format.value_decoding import (
    BIT_GENERATORS,
    FACTORIES,
    NUMPY_KINDS,
    ParameterName,
    decode,
)
from torchrelay.errors import BlobError
from torchrelay.jobs.containers import (
    classes_of_fields,
    is_generator,
    is_record,
    record_fields,
    registered_record,
)
from torchrelay.records import Json

__all__ = ["decode", "encode"]

TAG = "$"
CONTENT = "v"
LEVELS = 32
"""Maximum nesting; three levels of JSON each at most, within canonical_json.DEPTH_LIMIT."""
ARRAY_LIMIT = 1 << 20
"""Maximum bytes of an array, or of the numbers of a list, in JSON; larger ones become tensors."""

TensorWriter = Callable[[str, Any], Json]
"""Returns the JSON for a path and a tensor; a `ParameterName` for a parameter."""
BlobWriter = Callable[[str, Any], str | None]
"""Returns the blob name of an object at a path, or None."""

_NAN = struct.pack(">d", math.nan)


def encode(
    value: Any,
    path: str,
    *,
    tensor: TensorWriter | None = None,
    memory: TensorWriter | None = None,
    blob: BlobWriter | None = None,
) -> Json:
    """Encode a value as canonical JSON; `path` names it in messages (`scheduler`).

    Tensors inside are passed to `tensor`, objects that may be blobs to `blob`, arrays and lists of numbers
    above 1 MiB, as tensors, to `memory`. Without the callback they raise BlobError like all types outside of
    the table, with the path inside the object (`scheduler.a[3].b`). Cycles and more than 32 levels raise too.
    """
    return _scalar(value) if is_scalar(value) else _Encoder(tensor, memory, blob).encode(value, path)


def is_scalar(value: Any) -> bool:
    """Whether a value contains no others, so that it can always be stored, without a tensor."""
    return type(value) in _SCALARS


def has_known_factory(value: defaultdict[Any, Any]) -> bool:
    """Whether it has no factory, or one that a load can make again."""
    factory = value.default_factory
    return factory is None or FACTORIES.get(getattr(factory, "__name__", "")) is factory


def tagged(kind: str, content: Json) -> Json:
    """The tagged form."""
    return {TAG: kind, CONTENT: content}


def _path_below(path: str, key: Any) -> str:
    return f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"


class _Encoder:
    """Encodes one value."""

    def __init__(
        self, tensor: TensorWriter | None, memory: TensorWriter | None, blob: BlobWriter | None
    ) -> None:
        self._tensor = tensor
        self._memory = memory
        self._blob = blob
        self._inside: list[int] = []
        self._hashed = 0
        self._made: dict[int, tuple[Any, Any, Json]] = {}
        self._classes: dict[str, type] = {}
        """Dataclasses that are allowed here: those in the annotation of a field."""

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind in _SCALARS:
            return _scalar(value)
        if kind in _CONTAINERS:
            with self._entered(value, path):
                return self._container(value, path)
        return self._foreign(value, path)

    def _record(self, value: Any, path: str) -> Json:
        root = len(self._inside) == 1
        name = type(value).__qualname__
        known = (self._classes.get(name), registered_record(name))
        if not root and type(value) not in known:
            raise BlobError(
                f"{path} is an instance of the dataclass {name}, which no load could recreate: use a "
                "dict, a field of a dataclass whose annotation names that class, or have an instance in "
                "the container when it is registered"
            )
        kind: Any = type(value)
        outside, classes, fields = self._classes, classes_of_fields(kind), []
        try:
            for field in record_fields(value):
                self._classes = classes.get(field, {})
                fields.append([field, self.encode(getattr(value, field), f"{path}.{field}")])
            return [name, fields]
        finally:
            self._classes = outside

    @contextmanager
    def _entered(self, value: Any, path: str) -> Iterator[None]:
        if id(value) in self._inside:
            raise BlobError(f"{path} contains itself; a stored value must be a tree")
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
            return tagged(kind.__name__, self._set_items(value, path))
        if kind in (list, tuple):
            if self._memory is not None and not self._hashed and (numbers := _numbers(value)) is not None:
                return tagged("numbers", [kind.__name__, self._named(value, numbers, path, self._memory)])
            items = _scalars(value)
            if items is None:
                items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if kind is list else tagged("tuple", items)
        if kind is dict and _is_plain(value):
            if (items := _scalars(value.values())) is not None:
                return dict(zip(value, items, strict=True))
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        keys, items = _scalars(value), _scalars(value.values())
        if keys is not None and items is not None:
            return tagged(kind.__name__, list(map(list, zip(keys, items, strict=True))))
        return tagged(kind.__name__, [self._pair(key, item, path) for key, item in value.items()])

    def _set_items(self, value: Any, path: str) -> list[Json]:
        if set(map(type, value)) == {int} and _ALIKE[int](value):
            return sorted(value, key=str)
        return sorted(
            (self._hashable(item, lambda item: f"{path}{{{item!r}}}") for item in value),
            key=canonical_json.dumps,
        )

    def _pair(self, key: Any, item: Any, path: str) -> Json:
        hashed = self._hashable(key, lambda key: f"the key {key!r} of {path}")
        return [hashed, self.encode(item, _path_below(path, key))]

    def _hashable(self, value: Any, path_of: Callable[[Any], str]) -> Json:
        """An item of a set, or a key; tensors raise, because a load could not restore their identity."""
        if is_scalar(value):
            return _scalar(value)
        self._hashed += 1
        try:
            return self.encode(value, path_of(value))
        finally:
            self._hashed -= 1

    def _foreign(self, value: Any, path: str) -> Json:
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(value, torch.Tensor) and self._tensor is not None:
                if self._hashed:
                    raise BlobError(f"{path} is a tensor, found by its identity there: keep it in a list")
                name = self._tensor(path, value)
                learned = type(name) is ParameterName
                return tagged("parameter", str(name)) if learned else tagged("tensor", name)
            if type(value) is torch.Size:
                return tagged("torch.Size", list(value))
            if type(value) in (torch.dtype, torch.device):
                return tagged(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
        if (numpy := sys.modules.get("numpy")) is not None:
            stored = isinstance(value, (numpy.generic, numpy.ndarray)) and value.dtype.kind in NUMPY_KINDS
            if stored and type(value) is value.dtype.type:
                return tagged("numpy", [_dtype_text(value.dtype), _base64(value.tobytes())])
            # Not texts of length 0, which would get longer.
            if stored and type(value) is numpy.ndarray and value.dtype.itemsize > 0:
                return self._array(value, path)
        if type(value) in (deque, defaultdict) or is_generator(value):
            with self._entered(value, path):
                return (self._generator if is_generator(value) else self._collection)(value, path)
        if is_record(value):
            with self._entered(value, path):
                return tagged("dataclass", self._record(value, path))
        if self._blob is not None and (name := self._blob(path, value)) is not None:
            return tagged("blob", name)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind == "torch.utils.data.dataloader.DataLoader":
            raise BlobError(
                f"{path} is a DataLoader, which has no state to save: use an EpochLoader, "
                "which can be resumed within an epoch"
            )
        elements = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        raise BlobError(
            f"{path} is a {kind}{elements}, which cannot be stored: use tensors, numbers, text, bytes or "
            "containers of these, or an object with state_dict"
        )

    def _collection(self, value: deque[Any] | defaultdict[Any, Any], path: str) -> Json:
        if isinstance(value, deque):
            items = [self.encode(item, f"{path}[{at}]") for at, item in enumerate(value)]
            return tagged("deque", [value.maxlen, items])
        pairs = [
            [self.encode(key, f"the key {key!r} of {path}"), self.encode(item, _path_below(path, key))]
            for key, item in value.items()
        ]
        known, root = has_known_factory(value), len(self._inside) == 1
        if not (known or root):  # the program has an object to load a root into
            raise BlobError(
                f"{path} is a defaultdict inside another value, and no load could recreate its factory: use "
                f"one of {', '.join(FACTORIES)}, or a plain dict"
            )
        name = getattr(value.default_factory, "__name__", None) if known else None
        return tagged("defaultdict", [name, pairs])

    def _generator(self, value: Any, path: str) -> Json:
        if type(value) is random.Random:
            version, words, gauss = value.getstate()
            data = struct.pack(f"<{len(words)}I", *words)
            return tagged("random.Random", [version, _base64(data), self.encode(gauss, path)])
        if type(value).__module__.startswith("torch"):
            state = value.get_state().numpy().tobytes()
            return tagged("torch.Generator", [str(value.device), _base64(state)])
        if type(value).__name__ == "RandomState":
            return tagged("numpy.RandomState", self.encode(value.get_state(legacy=False), path))
        bits = value.bit_generator
        name = type(bits).__name__
        if name not in BIT_GENERATORS or not type(bits).__module__.startswith("numpy"):
            raise BlobError(
                f"{path} draws from a {type(bits).__qualname__}, which cannot be stored: use one of numpy's "
                f"own, {', '.join(BIT_GENERATORS)}"
            )
        seeds = getattr(getattr(bits, "seed_seq", None), "state", None)
        return tagged("numpy.Generator", [name, self.encode(bits.state, path), self.encode(seeds, path)])

    def _array(self, value: Any, path: str) -> Json:
        form = [_dtype_text(value.dtype), list(value.shape)]
        order: tuple[int, ...] | None = None  # the dimensions from the outermost, unless the default
        if not value.flags.c_contiguous:
            order = tuple(sorted(range(value.ndim), key=lambda dim: -value.strides[dim]))
            order = order if value.transpose(order).flags.c_contiguous else None
        if value.nbytes <= ARRAY_LIMIT:
            found = tagged("ndarray", [*form, _base64(value.tobytes())])
        elif self._memory is not None:
            tensor = _tensor_of(value, order)
            found = tagged("array", [*form, self._named(value, tensor, path, self._memory)])
            order = order if tensor.is_contiguous() else None  # else the tensor's leaf has it
        else:
            raise BlobError(
                f"{path} is a numpy array of {value.nbytes} bytes: keep it as a tensor (torch.from_numpy)"
            )
        return found if order is None else tagged("ordered", [list(order), found])

    def _named(self, value: Any, tensor: Any, path: str, memory: TensorWriter) -> Json:
        """The JSON for a tensor; one value at two places becomes one tensor."""
        if id(value) not in self._made:
            # Kept until all is encoded, so that no other object gets the id of either meanwhile.
            self._made[id(value)] = (value, tensor, memory(path, tensor))
        return self._made[id(value)][2]


_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict, Counter})
_TENSOR_KINDS = ("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D")


def _dtype_text(dtype: Any) -> str:
    """Text from which numpy makes the same type; two types of C may have one size and byte order."""
    import numpy

    text = str(dtype.str)
    return text if numpy.dtype(text).char == dtype.char else str(dtype.char)


def _tensor_of(value: Any, order: tuple[int, ...] | None) -> Any:
    """The elements as a tensor, sharing memory if possible; bytes for types that torch lacks."""
    import numpy
    import torch

    native = value.dtype.isnative and value.dtype.char in _TENSOR_KINDS
    if native and order is not None:
        places = [order.index(dim) for dim in range(len(order))]
        return _tensor_of(value.transpose(order), None).permute(places)
    dense = numpy.require(value, requirements=("C", "W"))
    # By size and kind: of two equal integers of C torch may have one.
    return torch.from_numpy(dense.view(dense.dtype.str) if native else dense.reshape(-1).view(numpy.uint8))


def _numbers(value: Any) -> Any:
    """The tensor of a long list of integers or of floats; None for any other."""
    if len(value) * 8 <= ARRAY_LIMIT or len(kinds := set(map(type, value))) > 1:
        return None
    if (code := _CODES.get(kinds.pop())) is None:
        return None
    import torch

    try:
        return torch.frombuffer(array(code, value), dtype=torch.int64 if code == "q" else torch.float64)
    except OverflowError:
        return None


_CODES = {int: "q", float: "d"}


def _scalars(items: Collection[Any]) -> list[Json] | None:
    """The JSON of all of these scalars; None if one is not a scalar."""
    kinds = set(map(type, items))
    if not kinds <= _SCALARS.keys():
        return None
    alike = _ALIKE.get(next(iter(kinds))) if len(kinds) == 1 else None
    if alike is not None and alike(items):
        return list(items)
    return [_SCALARS[type(item)](item) for item in items]


_ALIKE: dict[type, Callable[[Collection[Any]], bool]] = {
    type(None): lambda items: True,
    bool: lambda items: True,
    str: lambda items: all(map(str.isascii, items)),
    int: lambda items: min(items) > -INTEGER_LIMIT and max(items) < INTEGER_LIMIT,
    float: lambda items: all(map(math.isfinite, items)),
}
"""Tests for items of one type whether each of them is its own JSON."""


def _is_plain(value: dict[Any, Any]) -> bool:
    """Whether sorted JSON keeps this dict unchanged, its order included."""
    keys = list(value)
    if not all(type(key) is str and type(_str(key)) is str for key in keys) or TAG in value:
        return False
    return keys == sorted(keys)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _int(value: int) -> Json:
    if abs(value) < INTEGER_LIMIT:
        return value
    # Hexadecimal beyond what Python converts in linear time (sys.set_int_max_str_digits).
    return tagged("int", str(value) if value.bit_length() < 4096 else hex(value))


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
