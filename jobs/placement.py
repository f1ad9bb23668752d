"""Placement: on which nodes a task runs, decided from its `on=` and the node's place alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from torchrelay.errors import UsageError
from torchrelay.jobs.places import NodePlace

On = str | int | Collection[int] | Callable[[NodePlace], object]
"""Where a task runs: see `FORMS`."""

FORMS = (
    '"all", "rank0" (any rank<n>), an int or a list of ints (ranks), "host:1" (index or name), '
    '"local_rank0" (any local_rank<n>), "role:x", or a callable that takes the NodePlace'
)

_LISTS = (list, tuple, set, frozenset, range)
_TEXT = re.compile(
    r"(?P<all>all)|rank(?P<rank>[0-9]+)|local_rank(?P<local>[0-9]+)|host:(?P<host>.+)|role:(?P<role>.+)"
)


def check_on(on: On) -> None:
    """Raise UsageError, listing the forms there are, for an `on` that is none of them."""
    if isinstance(on, str):
        known = _TEXT.fullmatch(on) is not None
    elif callable(on):
        known = True
    else:
        known = all(map(_is_rank, on)) and len(on) > 0 if isinstance(on, _LISTS) else _is_rank(on)
    if not known:
        raise UsageError(f"on={on!r} says no place: use {FORMS}")


def selected(on: On, place: NodePlace) -> bool:
    """Whether a task with this `on` runs at `place`; raises UsageError for an unknown form."""
    check_on(on)
    if isinstance(on, str):
        return _text_selects(on, place)
    if callable(on):
        return bool(on(place))
    return place.rank == on if isinstance(on, int) else place.rank in on


def _text_selects(on: str, place: NodePlace) -> bool:
    match = _TEXT.fullmatch(on)
    found = match.groupdict() if match else {}
    if found["rank"]:
        return place.rank == int(found["rank"])
    if found["local"]:
        return place.local_rank == int(found["local"])
    if found["host"]:
        return found["host"] in (str(place.host_index), place.host)
    if found["role"]:
        return place.role == found["role"]
    return True


def _is_rank(rank: object) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
