"""Sections that belong to the user: mappings that note which keys a program reads, to find dead ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchrelay.jobs.config.nearest import hint
from torchrelay.jobs.config.problems import ConfigKeyError
from torchrelay.jobs.yaml_text import Where

if TYPE_CHECKING:
    from torchrelay.jobs.config.forms import Reading


class Tracked(Mapping[str, Any]):
    """A mapping of the configuration that cannot be changed; `[]`, `get`, `items` and `**` count as reading.

    Mappings inside are of the same kind, lists are copies. Asking whether a key is there, how many there
    are, and walking over the keys alone read nothing. `[]` raises ConfigKeyError for a key that is not there.
    """

    def __init__(self, content: Mapping[str, Any], where: Where, reading: Reading) -> None:
        self._content, self._where, self._reading = content, where, reading

    def __getitem__(self, key: str) -> Any:
        where = (*self._where, key)
        if key not in self._content:
            self._reading.misses[where] = None
            raise ConfigKeyError(self._missing(where))
        self._reading.reads.add(where)
        return self._shown(self._content[key], where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def __repr__(self) -> str:
        return repr(dict(self._content))

    def plain(self) -> dict[str, Any]:
        """A dict of its own, dicts and lists inside; all of it counts as read."""
        self._reading.reads.update(leaves(self._content, self._where))
        return _copied(self._content)  # type: ignore[no-any-return]

    def unread(self) -> list[Where]:
        """The places of the values in it that were not read so far."""
        return [
            one
            for one in leaves(self._content, self._where)
            if self._content and one not in self._reading.reads
        ]

    def _shown(self, value: Any, where: Where) -> Any:
        if isinstance(value, dict):
            return Tracked(value, where, self._reading)
        if isinstance(value, list):
            self._reading.reads.add(where)
            return [self._shown(one, (*where, at)) for at, one in enumerate(value)]
        self._reading.reads.add(where)
        return value

    def _missing(self, where: Where) -> str:
        tree = self._reading.tree
        near = hint(str(where[-1]), self._content) if self._content else "the section is empty"
        return f"{tree.origin(self._where)}: {tree.path(where)} is not in the configuration; {near}"


def leaves(value: Any, where: Where) -> Iterator[Where]:
    """The places of the values that are no mappings; empty ones, and lists without mappings, are values."""
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from leaves(one, (*where, name))
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for at, one in enumerate(value):
            yield from leaves(one, (*where, at))
    else:
        yield where


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
