"""Containers: registered values that the program and a load change in place.

Containers are lists, dicts, sets, deques, byte arrays, numpy arrays, dataclass instances and random number
generators. Immutable values (a number, a tuple) can only be replaced. Objects with state inside a container
are separate blobs, named by their path: `parts={"model": model, "step": 0}` gives `parts.model`, and `parts`
with everything else.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
import types
import typing
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_IN_PLACE = (*MAPPINGS, list, set, deque, bytearray)
_FIXED = (tuple, frozenset, types.MappingProxyType)


def is_container(value: object) -> bool:
    """Return True if a blob holds the value itself, so that its content at each boundary is saved."""
    in_place = type(value) in _IN_PLACE or is_generator(value) or is_array(value)
    return in_place or _is_dataclass(value, frozen=False)


def is_generator(value: object) -> bool:
    """Return True for a random number generator of torch, numpy or Python."""
    kind = type(value)
    if kind is random.Random:
        return True
    torch: Any = sys.modules.get("torch")  # reading values must not import numpy
    if torch is not None and kind is torch.Generator:
        return True
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and kind in (numpy.Generator, numpy.RandomState)


def is_record(value: object) -> bool:
    """Return True for a dataclass instance, frozen or not, without `state_dict`."""
    return _is_dataclass(value, frozen=False) or _is_dataclass(value, frozen=True)


def is_fixed(value: object) -> bool:
    """Return True if the value holds others and is immutable."""
    kind = type(value)
    named = isinstance(value, tuple) and hasattr(kind, "_fields")
    return kind in _FIXED or named or _is_dataclass(value, frozen=True)


def children(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the direct items of a container or fixed value with their path components (`.key`, `.0`)."""
    if isinstance(value, (*MAPPINGS, types.MappingProxyType)):
        for key, item in value.items():
            yield f".{key}" if isinstance(key, str) else f"[{key!r}]", item
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        for index, item in enumerate(value):
            yield f".{index}", item
    elif is_record(value):
        for name in record_fields(value):
            yield f".{name}", getattr(value, name)


def record_fields(value: object) -> list[str]:
    """Return the names of the fields that a dataclass instance currently has."""
    return [field.name for field in dataclasses.fields(typing.cast(Any, value)) if hasattr(value, field.name)]


def found_inside(value: object, name: str, wanted: Callable[[Any, Any], bool]) -> Iterator[tuple[str, Any]]:
    """Return the objects in a container at any depth that are `wanted(holder, object)`, by dotted name."""
    seen: set[int] = set()
    pending = [(name, value)]
    while pending:
        path, holder = pending.pop()
        if id(holder) in seen or _holds_scalars(holder):
            continue
        seen.add(id(holder))
        below = [(path + part, child) for part, child in children(holder)]
        for where, child in below:
            if wanted(holder, child):
                yield where, child
        others = [one for one in reversed(below) if not hasattr(one[1], "is_cuda")]  # except tensors
        pending += [one for one in others if is_container(one[1]) or is_fixed(one[1])]


def _holds_scalars(value: object) -> bool:
    """Fast check: return True if all items are plain scalars, so that there is nothing to find."""
    if isinstance(value, (*MAPPINGS, types.MappingProxyType)):
        return set(map(type, value.values())) <= _SCALARS
    return isinstance(value, (list, tuple, deque, set, frozenset)) and set(map(type, value)) <= _SCALARS


_SCALARS = {type(None), bool, int, float, complex, str, bytes}


def within(value: object, path: str) -> tuple[Any, Any] | None:
    """Resolve a dotted path inside a container to its innermost holder and key, which may be a new one."""
    if isinstance(value, MAPPINGS):
        for name in [name for name in value if isinstance(name, str) and path.startswith(f"{name}.")]:
            if (found := within(value[name], path[len(name) + 1 :])) is not None:
                return found
        return value, path
    head, dot, rest = path.partition(".")
    key: Any = head
    if isinstance(value, (list, tuple, deque)):
        key = int(head) if head.isdecimal() and int(head) < len(value) else None
    elif not is_record(value) or head not in record_fields(value):
        key = None
    if key is None:
        return None
    return within(item_of(value, key), rest) if dot else (value, key)


def item_of(holder: Any, key: Any) -> Any:
    """Return the item at a key returned by `within`; raises KeyError for a new key."""
    return getattr(holder, key) if is_record(holder) else holder[key]


def set_item(holder: Any, key: Any, value: Any) -> None:
    """Set the item at a key returned by `within`."""
    if is_record(holder):
        setattr(holder, key, value)
    else:
        holder[key] = value


def note_records(value: object) -> None:
    """Record the dataclasses of the instances in a registered container."""
    found = [value] if is_record(value) else []
    found += [one for _, one in found_inside(value, "", lambda _, one: is_record(one))]
    _registered.update({type(one).__qualname__: type(one) for one in found})


def registered_record(name: str) -> type | None:
    """Return the registered dataclass with this qualified name."""
    return _registered.get(name)


_registered: dict[str, type] = {}


@lru_cache(maxsize=256)
def classes_of_fields(kind: type) -> dict[str, dict[str, type]]:
    """Return the dataclasses in the annotation of each field, by qualified name."""
    found: dict[str, dict[str, type]] = {}
    for base in reversed(kind.__mro__):
        around = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, hint in inspect.get_annotations(base).items():
            alone = types.SimpleNamespace(__annotations__={name: hint})
            try:
                hints = typing.get_type_hints(alone, around, {base.__name__: base})
            except Exception:  # an annotation that cannot be resolved
                hints = {}
            found[name] = {one.__qualname__: one for one in _mentioned(hints.get(name))}
    return found


def _mentioned(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _mentioned(part)


def is_array(value: object) -> bool:
    """Return True for a numpy array, without importing numpy."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None)


def _is_dataclass(value: object, *, frozen: bool) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen is frozen and not hasattr(value, "state_dict")
