"""Typed values of containers and generators that JSON and the table of `values.py` lack.

    deque             [maxlen or null, list]
    defaultdict       [name of the factory or null, [[key, value], ...]]
    dataclass         [qualified name, [[field, value], ...]]
    blob              the name of the blob that stands there
    torch.Generator   [device, base64]
    numpy.Generator   [bit generator, state, seed sequence or null]
    numpy.RandomState state
    random.Random     [version, base64 of 32-bit words, gauss]

States are plain numbers and bytes. No class is looked up by a name from a file, but the bit generators and
factories that are listed here: an instance of a dataclass comes back as a dict of its fields, unless a
caller has the object to put them into.
"""

from __future__ import annotations

import base64
import importlib
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.errors import BlobError, DamagedError, FormatError

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
FACTORIES: dict[str, type] = {
    one.__name__: one
    for one in (list, dict, set, int, float, complex, bool, str, tuple, deque, Counter, OrderedDict)
}
_UNKNOWN = "unknown to this torchrelay: use a newer one"
Encode = Callable[[Any, str], Json]
Decode = Callable[[Json], Any]
Record = Callable[[str, dict[str, Any]], Any]
"""Given the qualified name of a dataclass and its fields, gives what stands for them."""


def encode_container(value: Any, path: str, encode: Encode, *, root: bool) -> tuple[str, Json]:
    """Tag and content of a deque, a defaultdict or a generator.

    `root` is whether the value is all that is stored: the program then has an object to load it into.
    """
    if type(value) is deque:
        return "deque", [value.maxlen, [encode(item, f"{path}[{at}]") for at, item in enumerate(value)]]
    if type(value) is defaultdict:
        pairs = [
            [encode(k, f"the key {k!r} of {path}"), encode(v, _inside(path, k))] for k, v in value.items()
        ]
        return "defaultdict", [_factory_name(value.default_factory, path, root=root), pairs]
    return _generator_json(value, path, encode)


def _inside(path: str, key: Any) -> str:
    return f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"


def _factory_name(factory: Any, path: str, *, root: bool) -> str | None:
    name = getattr(factory, "__name__", "")
    if factory is None or (root and FACTORIES.get(name) is not factory):
        return None
    if FACTORIES.get(name) is not factory:
        raise BlobError(
            f"{path} is a defaultdict inside another value, and no load could make its factory again: use "
            f"one of {', '.join(FACTORIES)}, or a plain dict"
        )
    return str(name)


def _generator_json(value: Any, path: str, encode: Encode) -> tuple[str, Json]:
    if type(value) is random.Random:
        version, words, gauss = value.getstate()
        return "random.Random", [version, _text(_words(words)), encode(gauss, path)]
    if type(value).__module__.startswith("torch"):
        state = value.get_state()
        return "torch.Generator", [str(value.device), _text(state.numpy().tobytes())]
    if type(value).__name__ == "RandomState":
        return "numpy.RandomState", encode(value.get_state(legacy=False), path)
    bits = value.bit_generator
    if type(bits).__name__ not in BIT_GENERATORS or not type(bits).__module__.startswith("numpy"):
        raise BlobError(
            f"{path} draws from a {type(bits).__qualname__}, which cannot be stored: use one of numpy's own, "
            f"{', '.join(BIT_GENERATORS)}"
        )
    seeds = getattr(getattr(bits, "seed_seq", None), "state", None)
    return "numpy.Generator", [type(bits).__name__, encode(bits.state, path), encode(seeds, path)]


def decode_container(kind: str, content: Json, decode: Decode, record: Record) -> Any:
    """The value again; a generator is a new one with that state."""
    return _DECODERS[kind](content, decode, record)


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
    state = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8)
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
    numpy = _numpy_random()
    given = decode(seeds)
    bits = getattr(numpy, name)(None if given is None else numpy.SeedSequence(**given))
    bits.state = decode(state)
    return numpy.Generator(bits)


def _random_state(content: Json, decode: Decode, record: Record) -> Any:
    state = decode(content)
    if state["bit_generator"] not in BIT_GENERATORS:
        raise FormatError(f"a stored RandomState draws from {state['bit_generator']!r}, {_UNKNOWN}")
    numpy = _numpy_random()
    found = numpy.RandomState(getattr(numpy, state["bit_generator"])())
    found.set_state(state)
    return found


def _python_random(content: Json, decode: Decode, record: Record) -> random.Random:
    version, words, gauss = content
    found = random.Random()  # noqa: S311
    data = base64.b64decode(words, validate=True)
    state = struct.unpack(f"<{len(data) // 4}I", data)
    found.setstate((version, state, decode(gauss)))
    return found


def _numpy_random() -> Any:
    try:
        return importlib.import_module("numpy.random")
    except ImportError as error:
        raise FormatError("a stored generator is a numpy one: install numpy") from error


def _words(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_DECODERS: dict[str, Callable[[Json, Decode, Record], Any]] = {
    "deque": _deque,
    "defaultdict": _defaultdict,
    "dataclass": _record,
    "torch.Generator": _torch_generator,
    "numpy.Generator": _numpy_generator,
    "numpy.RandomState": _random_state,
    "random.Random": _python_random,
}
CONTAINER_KINDS = frozenset(_DECODERS)
