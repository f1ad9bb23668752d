"""A configuration between text and meaning: nested values, and where each of them comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchrelay.jobs.config.problems import Origin, dotted
from torchrelay.jobs.yaml_text import Where
from torchrelay.records import dataclass

_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Tree:
    """`value` is nested mappings and lists; `origins` of values, `keys` of keys; nobody changes any of them.

    What lies at a `broken` place was complained of and means nothing.
    """

    value: dict[str, Any]
    origins: Mapping[Where, Origin]
    keys: Mapping[Where, Origin]
    broken: frozenset[Where] = frozenset()

    def origin(self, where: Where) -> Origin:
        """Where a value stands; of one that stands nowhere, where the nearest thing around it does."""
        while where not in self.origins:
            where = where[:-1]
        return self.origins[where]

    def key_origin(self, where: Where) -> Origin:
        """Where the key of a value stands, else the value."""
        return self.keys.get(where) or self.origin(where)

    def path(self, where: Where) -> str:
        """The dotted path that people write: items of lists by their names."""
        return dotted(where, names_in(self.value, where))


@dataclass(frozen=True)
class Missing:
    """A dotted path leads no further than `where`; `rest` is what is left of it, `known` what would go on."""

    where: Where
    rest: tuple[str, ...]
    known: tuple[str, ...]
    leaf: bool
    """Whether what lies at `where` is no collection."""


def find(top: Any, path: str) -> Where | Missing:
    """Where a dotted path leads. Items of lists go by name, else by index; keys may have dots themselves."""
    where: Where = ()
    here, rest = top, tuple(path.split("."))
    while rest:
        step = _step(here, rest)
        if step is None:
            return Missing(where, rest, _known(here), not isinstance(here, (dict, list)))
        at, used = step
        here, where, rest = here[at], (*where, at), rest[used:]
    return where


def value_at(top: Any, where: Where) -> Any:
    """What lies there."""
    for one in where:
        top = top[one]
    return top


def names_in(top: Any, where: Where) -> dict[Where, str]:
    """The names of the list items on the way to `where`."""
    found: dict[Where, str] = {}
    for at, one in enumerate(where):
        try:
            top = top[one]
        except (LookupError, TypeError):
            break
        if isinstance(one, int) and (name := item_name(top)) is not None:
            found[where[: at + 1]] = name
    return found


def item_name(item: Any) -> str | None:
    """The `name` of a list item, where it has one that is a text."""
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) else None


def _step(here: Any, rest: tuple[str, ...]) -> tuple[str | int, int] | None:
    """The key or index that goes on, and how many words of `rest` it is; the longest name wins."""
    for used in range(len(rest), 0, -1):
        word = ".".join(rest[:used])
        if isinstance(here, dict) and word in here:
            return word, used
        if isinstance(here, list):
            named = [at for at, item in enumerate(here) if item_name(item) == word]
            if named:
                return named[0], used
            if used == 1 and _DIGITS.fullmatch(word) and int(word) < len(here):
                return int(word), used
    return None


def _known(here: Any) -> tuple[str, ...]:
    if isinstance(here, dict):
        return tuple(here)
    if isinstance(here, list):
        return tuple(item_name(item) or str(at) for at, item in enumerate(here))
    return ()
