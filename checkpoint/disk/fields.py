"""Typed access to the fields of a JSON object that was read from disk.

Each function takes an object and a key and raises DamagedError naming the file and the field when
the value is not of that kind. `bool` is never taken for an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

Json = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """One JSON object, and what to call it in an error."""

    values: Mapping[str, Json]
    what: str

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """A whole number from `minimum` on."""
        value = self.values.get(key)
        if type(value) is not int or value < minimum:
            raise self.wrong(key)
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def flag(self, key: str) -> bool:
        """A truth value."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key)
        return value

    def items(self, key: str) -> list[Json]:
        """A list."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key)
        return tuple(values)

    def fields(self, key: str) -> Fields:
        """An object inside this one."""
        return self._inner(self.values.get(key), key)

    def each(self, key: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        """A list of objects, each through `read`."""
        return tuple(read(self._inner(value, key)) for value in self.items(key))

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """None where the field is null, else `read(key)`; an absent field is an error."""
        if key not in self.values:
            raise self.wrong(key)
        return None if self.values[key] is None else read(key)

    def rest(self, known: frozenset[str]) -> dict[str, Json]:
        """The fields that this version does not know; whoever rewrites the object keeps them."""
        return {key: value for key, value in self.values.items() if key not in known}

    def wrong(self, key: str) -> DamagedError:
        """The error for a field that is absent or not what it must be."""
        return DamagedError(f"{self.what} is damaged: {key!r} is {self.values.get(key)!r:.80}")

    def _inner(self, value: Json, key: str) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(key)
        return Fields(value, f"{self.what} ({key})")
