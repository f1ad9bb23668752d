"""Decode values that `values.encode` stored as JSON.

No class is looked up by a name from a file, except the bit generators and factories listed here. An instance
of a dataclass is decoded to a dict of its fields, unless the caller has an object for them.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchrelay.errors import DamagedError, FormatError, RelayError
from torchrelay.records import Json

NUMPY_KINDS = "biufcSUmM"
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
FACTORIES: dict[str, type] = {
    one.__name__: one
    for one in (list, dict, set, int, float, complex, bool, str, tuple, deque, Counter, OrderedDict)
}
_UNKNOWN = "unknown to this torchrelay: use a newer one"
Decode = Callable[[Json], Any]
Record = Callable[[str, dict[str, Any]], Any]
"""Makes the object for a dataclass from its qualified name and its fields."""


def _deque(content: Json, decode: Decode, record: Record) -> deque[Any]:
    limit, items = content
    if limit is not None and (type(limit) is not int or len(items) > limit):
        raise DamagedError(f"a stored deque of at most {limit!r} has {len(items)} items")
    return deque(map(decode, items), limit)


def _defaultdict(content: Json, decode: Decode, record: Record) -> defaultdict[Any, Any]:
    factory, pairs = content
    if factory is not None and factory not in FACTORIES:
        raise FormatError(f"a stored defaultdict makes {factory!r}, {_UNKNOWN}")
    found: defaultdict[Any, Any] = defaultdict(FACTORIES.get(factory or ""))
    found.update((decode(key), decode(item)) for key, item in pairs)
    if len(found) != len(pairs):
        raise DamagedError("a stored dict has a key twice")
    return found


def _record(content: Json, decode: Decode, record: Record) -> Any:
    name, pairs = content
    fields = {str(field): decode(item) for field, item in pairs}
    if len(fields) != len(pairs):
        raise DamagedError("a stored dataclass has a field twice")
    return record(str(name), fields)


def _torch_generator(content: Json, decode: Decode, record: Record) -> Any:
    import torch

    device, data = content
    state = torch.frombuffer(bytearray(_bytes(data)), dtype=torch.uint8)
    try:
        found = torch.Generator(device=device)
        found.set_state(state)
    except RuntimeError as error:
        raise FormatError(f"a stored generator of {device!r} cannot be made here: {error}") from error
    return found


def _numpy_generator(content: Json, decode: Decode, record: Record) -> Any:
    name, state, seeds = content
    if name not in BIT_GENERATORS:
        raise FormatError(f"a stored generator draws from {name!r}, {_UNKNOWN}")
    given, numpy = decode(seeds), _numpy("generator").random
    bits = getattr(numpy, name)(None if given is None else numpy.SeedSequence(**given))
    bits.state = decode(state)
    return numpy.Generator(bits)


def _random_state(content: Json, decode: Decode, record: Record) -> Any:
    state = decode(content)
    if state["bit_generator"] not in BIT_GENERATORS:
        raise FormatError(f"a stored RandomState draws from {state['bit_generator']!r}, {_UNKNOWN}")
    numpy = _numpy("generator").random
    found = numpy.RandomState(getattr(numpy, state["bit_generator"])())
    found.set_state(state)
    return found


def _python_random(content: Json, decode: Decode, record: Record) -> random.Random:
    version, words, gauss = content
    found = random.Random()  # noqa: S311
    data = _bytes(words)
    state = struct.unpack(f"<{len(data) // 4}I", data)
    found.setstate((version, state, decode(gauss)))
    return found


_DECODERS: dict[str, Callable[[Json, Decode, Record], Any]] = {
    "deque": _deque,
    "defaultdict": _defaultdict,
    "dataclass": _record,
    "torch.Generator": _torch_generator,
    "numpy.Generator": _numpy_generator,
    "numpy.RandomState": _random_state,
    "random.Random": _python_random,
}


TensorReader = Callable[[Json], Any]
"""Returns the tensor for its stored reference; a `ParameterName` refers to a parameter."""
BlobReader = Callable[[str], Any]
"""Returns the object of a blob name."""


class ParameterName(str):
    """The name of a tensor that is an `nn.Parameter`."""


def decode(
    json: Json,
    *,
    tensor: TensorReader | None = None,
    blob: BlobReader = lambda name: None,
    record: Record = lambda name, fields: fields,
) -> Any:
    """Decode a value of `values.encode`.

    `record` makes instances of dataclasses from their fields; default: a dict.

    Raises FormatError for an unknown kind, or a missing library, and DamagedError for malformed content.
    """
    try:
        return _decode(json, _Readers(tensor, blob, record))
    except RelayError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise DamagedError(f"a stored value is malformed: {error}") from error


def references(json: Json) -> list[str]:
    """The references to tensors in a value, in order."""
    found: list[str] = []
    decode(json, tensor=lambda name: found.append(str(name)))
    return found


def holds_only_tensors(json: Json) -> bool:
    """Whether a value is a dict of tensors, or of such dicts, whose names describe it completely."""
    if not isinstance(json, dict):
        return False
    if json.get("$") == "tensor":
        return True
    items = list(json.values()) if "$" not in json else []
    if json.get("$") in _MAPPINGS:
        items = [item for _, item in json["v"]]
    return bool(items) and all(map(holds_only_tensors, items))


def renamed_references(json: Json, names: Mapping[str, str]) -> Json:
    """The same value with other names for its tensors; names that are not in `names` stay."""
    if isinstance(json, list):
        return [renamed_references(item, names) for item in json]
    if not isinstance(json, dict):
        return json
    if "$" not in json:
        return {key: renamed_references(item, names) for key, item in json.items()}
    kind, content = json["$"], json["v"]
    if kind in _TENSORS:  # the name is alone, or at the end
        *form, name = [content] if isinstance(content, str) else content
        name = names.get(name, name)
        return {"$": kind, "v": [*form, name] if form else name}
    if kind == "blob":
        return {"$": kind, "v": names.get(content, content)}
    if kind in _SEQUENCES or kind in _MAPPINGS or kind in _DECODERS or kind == "ordered":
        return {"$": kind, "v": renamed_references(content, names)}
    return json


class _Readers(NamedTuple):
    """Callbacks of `decode`."""

    tensor: TensorReader | None
    blob: BlobReader
    record: Record


def _decode(json: Json, by: _Readers) -> Any:
    if isinstance(json, list):
        return _items(json, by)
    if not isinstance(json, dict):
        return json
    if "$" not in json:
        return dict(zip(json, _items(list(json.values()), by), strict=True))
    kind, content = json["$"], json["v"]
    if kind in _TENSORS and by.tensor is not None:
        return _TENSORS[kind](content, by.tensor)
    if kind == "blob":
        return by.blob(str(content))
    if kind in _DECODERS:
        return _DECODERS[kind](content, lambda inner: _decode(inner, by), by.record)
    if kind in _LEAVES:
        return _LEAVES[kind](content)
    if kind == "ordered":
        return _ordered(content[0], _decode(content[1], by))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_items(content, by))
    if kind in _MAPPINGS:
        empty = _MAPPINGS[kind]()
        for key, item in content:
            # Not update(): Counter.update would add, and need numbers.
            empty[_decode(key, by)] = _decode(item, by)
        if len(empty) != len(content):
            raise DamagedError("a stored dict has a key twice")
        return empty
    raise FormatError(f"a stored value is of kind {kind!r}, unknown to this torchrelay: use a newer one")


def _items(json: list[Json], by: _Readers) -> list[Any]:
    if set(map(type, json)).isdisjoint((list, dict)):
        return list(json)
    return [_decode(item, by) for item in json]


def _bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _float(content: Json) -> float:
    if content == "nan":
        return float("nan")  # a new object each time, which distinguishes them as keys
    if isinstance(content, str) and content.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(content[4:]))[0])
    return {"inf": math.inf, "-inf": -math.inf}[content]


def _complex(content: Json) -> complex:
    real, imaginary = (part if isinstance(part, float) else _float(part["v"]) for part in content)
    # Not real + imaginary * 1j, which changes zeros and infinities.
    return complex(real, imaginary)


def _numpy_scalar(content: Json) -> Any:
    dtype, data = _numpy_dtype(content[0]), _bytes(content[1])
    if dtype.kind not in "SU":
        return _numpy().frombuffer(data, dtype)[0]
    data = data[: dtype.itemsize]  # numpy gives an empty text one character
    if dtype.kind == "S":  # an array would drop zeros at its end
        return dtype.type(data)
    return dtype.type(data.decode("utf-32-be" if dtype.byteorder == ">" else "utf-32-le", "surrogatepass"))


def _array(content: Json) -> Any:
    dtype, shape, data = content
    return _numpy().frombuffer(bytearray(_bytes(data)), _numpy_dtype(dtype)).reshape(shape)


def _ordered(order: Json, array: Any) -> Any:
    """The same array with this memory order of its dimensions, from the outermost."""
    if array is None:  # only names are requested
        return None
    if sorted(order) != list(range(array.ndim)):
        raise DamagedError(f"an array of {array.ndim} dimensions has the invalid order {order}")
    laid = _numpy().ascontiguousarray(array.transpose(order))
    return laid.transpose([order.index(dim) for dim in range(array.ndim)])


def _array_in_tensor(content: Json, tensor: TensorReader) -> Any:
    """An array whose elements, or their bytes, are a tensor; None if only names are requested."""
    text, shape, name = content
    dtype, found = _numpy_dtype(text), tensor(name)
    if found is None:
        return None
    elements = found.cpu().numpy()
    if elements.dtype not in (dtype, "u1"):
        raise DamagedError(f"an array of {dtype} is stored in a tensor of {elements.dtype}")
    return elements.view(dtype).reshape(shape)  # an equal type may be another one in C


def _numbers(content: Json, tensor: TensorReader) -> Any:
    """A list of numbers that is a tensor."""
    kind, name = content
    found = tensor(name)
    return None if found is None else {"list": list, "tuple": tuple}[kind](found.tolist())


def _numpy_dtype(text: str) -> Any:
    dtype = _numpy().dtype(text)
    if dtype.kind not in NUMPY_KINDS:
        raise DamagedError(f"a stored value has the numpy type {text!r}")
    return dtype


def _numpy(what: str = "value") -> Any:
    try:
        import numpy
    except ImportError as error:
        raise FormatError(f"a stored {what} is a numpy one: install numpy") from error
    return numpy


def _torch_dtype(content: str) -> Any:
    import torch

    found = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"invalid element type torch.{content}")
    return found


def _torch_device(content: str) -> Any:
    import torch

    try:
        return torch.device(content)
    except RuntimeError as error:
        raise DamagedError(f"invalid device {content!r}: {error}") from error


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16) if "x" in content else int(content),
    "float": _float,
    "complex": _complex,
    "bytes": _bytes,
    "bytearray": lambda content: bytearray(_bytes(content)),
    "str": lambda content: _bytes(content).decode("utf-16-le", "surrogatepass"),
    "numpy": _numpy_scalar,
    "ndarray": _array,
    "torch.dtype": _torch_dtype,
    "torch.device": _torch_device,
    "torch.Size": lambda content: importlib.import_module("torch").Size(content),
}
_TENSORS: dict[str, Callable[[Any, TensorReader], Any]] = {
    "tensor": lambda content, tensor: tensor(content),
    "parameter": lambda content, tensor: tensor(
        ParameterName(content) if isinstance(content, str) else content
    ),
    "array": _array_in_tensor,
    "numbers": _numbers,
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
