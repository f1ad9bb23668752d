"""What is given to a load of objects, and what it gives back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import objects_inside
from torchrelay.jobs.containers import is_container
from torchrelay.records import dataclass


@dataclass(frozen=True)
class LoadResult:
    """What a load did: leaf names by the names that the objects know, and bytes read, headers included.

    `misshapen` are those that both sides have in different forms, where the load was to skip them.
    `nodes` has, for each leaf that differs between nodes, whose value was taken.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    bytes_read: int = 0
    misshapen: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)

    def costing(self, nbytes: int) -> LoadResult:
        """The result with the bytes that it took."""
        return replace(self, bytes_read=nbytes)


def checked_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The objects, and those with state inside containers, by blob name; raises UsageError for no mapping."""
    if not isinstance(objects, Mapping) or not all(issubclass(kind, str) for kind in set(map(type, objects))):
        raise UsageError(
            f'give the objects by blob name, load({{"model": model}}), not {type(objects).__name__}'
        )
    one_each = {type(value): value for value in objects.values()}  # of very many tensors none is asked alone
    held = {kind for kind, value in one_each.items() if is_container(value)}
    containers = [(name, value) for name, value in objects.items() if type(value) in held] if held else []
    inside = {inner: found for name, value in containers for inner, found in objects_inside(value, name)}
    return {**inside, **objects}


def blob_of(name: str, objects: Collection[str]) -> str | None:
    """The object that a leaf belongs to. No blob's name is a dotted prefix of another's."""
    while name not in objects:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def of_objects(names: Iterable[str], objects: Mapping[str, Any]) -> list[str]:
    """The leaf names that belong to some object, in their order.

    Few of many are found by looking for what begins like them, not by asking every name.
    """
    if not objects:
        return []
    names = list(names)
    if len(objects) * _FEW > len(names):
        return [name for name in names if name in objects or blob_of(name, objects) is not None]
    below = tuple(f"{name}." for name in objects)
    return [name for name in names if name in objects or name.startswith(below)]


_FEW = 64
"""Names per object from which on a scan for beginnings, quadratic but in C, costs less."""
