"""Prints the public names of torchrelay with their signatures: `python make_public_api.py > public_api.txt`.

A line that is new is an addition, one that is gone or reads otherwise is a change for users: see the policy
in docs/deprecation.md before the text is made anew.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator

import torchrelay


def lines() -> Iterator[str]:
    """A line for each name, and one for each public member of a class."""
    for name in sorted(torchrelay.__all__, key=str.lower):
        value = getattr(torchrelay, name)
        if isinstance(value, type):
            yield f"class {name}{_bases(value)}"
            yield from (f"    {name}.{one}" for one in _members(value))
        elif callable(value):
            yield f"{name}{_signature(value)}"
        else:
            yield name


def _bases(kind: type) -> str:
    known = [base.__name__ for base in kind.__bases__ if base is not object]
    return f"({', '.join(known)})" if known else ""


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield from (f"{one.name} = {one.value!r}" for one in kind)
        return
    if kind.__init__ is not object.__init__ and not getattr(kind, "_is_protocol", False):
        yield f"__init__{_signature(kind.__init__)}"
    for name in sorted(dir(kind)):
        found = inspect.getattr_static(kind, name)
        if name.startswith("_") or not _ours(kind, name):
            continue
        if isinstance(found, classmethod | staticmethod):
            yield f"{name}{_signature(found.__func__)}"
        elif callable(found):
            yield f"{name}{_signature(found)}"
        else:
            yield name  # a property, or a value of the class


def _ours(kind: type, name: str) -> bool:
    """Whether the class that a member comes from is one of torchrelay's."""
    where = next(base for base in kind.__mro__ if name in vars(base))
    return where.__module__.startswith("torchrelay")


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"


if __name__ == "__main__":
    print("\n".join(lines()))
