"""What goes in the near directories of hosts that do not have the log: rank 0 tells, each leader deletes.

A leader deletes only names that it saw before the first save of this start, or that rank 0 tells as gone: one
that was frozen for long knows no name of what others save there meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torchrelay.checkpoint.format.log_state import Retirement, State
from torchrelay.checkpoint.format.manifest.schema import DATA
from torchrelay.checkpoint.format.names import TRY
from torchrelay.checkpoint.log.garbage import delete_try
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import StorageError

Json = Any


def gone_between(before: State, now: State) -> tuple[Retirement, ...]:
    """What the log needed before and does not need any more: tries, or some groups of their files."""
    old, new = _groups_by_try(before), _groups_by_try(now)
    whole = (Retirement(name) for name in sorted(old.keys() - new.keys()))
    less = (
        Retirement(name, tuple(group for group in groups if group not in (new[name] or ())))
        for name, groups in sorted(old.items())
        if groups is not None and new.get(name) is not None and new[name] != groups
    )
    return (*whole, *(one for one in less if one.groups))


def _groups_by_try(state: State) -> dict[str, tuple[str, ...] | None]:
    """All tries that the log needs; None: with all of their files."""
    groups = {entry.try_name: entry.groups or None for entry in state.entries}
    return {name: groups.get(name) for name in state.tries}


def row(one: Retirement) -> list[Json]:
    """A retirement as it travels."""
    return [one.try_name, None if one.groups is None else list(one.groups)]


def retirement_of(told: list[Json]) -> Retirement:
    """Read what `row` made."""
    name, groups = told
    return Retirement(str(name), None if groups is None else tuple(map(str, groups)))


def left_over(near: Storage, live: Collection[str]) -> tuple[Retirement, ...]:
    """Tries that lie here and that the log does not need."""
    names = near.list(DATA)
    return tuple(Retirement(name) for name in names if TRY.fullmatch(name) and name not in live)


def delete(near: Storage, gone: Iterable[Retirement]) -> None:
    """Delete their files. Raises StorageError, having tried them all."""
    failed: StorageError | None = None
    for one in gone:
        try:
            delete_try(near, one)
        except StorageError as error:
            failed = error
    if failed is not None:
        raise failed
