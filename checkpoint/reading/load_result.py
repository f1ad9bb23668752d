"""What is given to a load of objects, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchrelay.errors import UsageError


@dataclass(frozen=True)
class LoadResult:
    """What a load did: leaf names by the names that the objects know, and bytes read, headers included."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    bytes_read: int = 0

    def costing(self, nbytes: int) -> LoadResult:
        """The result with the bytes that it took."""
        return replace(self, bytes_read=nbytes)


def check_objects(objects: Mapping[str, Any]) -> None:
    """Refuse what is no mapping of blob names; raises UsageError."""
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        raise UsageError(
            f'give the objects by blob name, load({{"model": model}}), not {type(objects).__name__}'
        )
