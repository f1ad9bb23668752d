"""The world of this process, where it has met one; to ask for it imports nothing of what a world is."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.runners.distributed.world import World

_worlds: list[World] = []
_of_parents: list[World] = []
"""Kept, because their end would be told to the others."""


def enter(world: World) -> None:
    """It is the current one until it is left, or a later one is entered."""
    _worlds.append(world)


def leave(world: World) -> None:
    """It is over."""
    _worlds.remove(world)


def current_world() -> World | None:
    """The world that was made and is not closed; None in a program that made none."""
    return _worlds[-1] if _worlds else None


def world_of_parent() -> World | None:
    """The world of the process that this one was forked out of; None where that was no rank."""
    return _of_parents[-1] if _of_parents else None


def _begin_anew() -> None:
    """In a forked process: it is no rank, whatever its parent is."""
    for world in _worlds:
        atexit.unregister(world.close)
    _of_parents.extend(_worlds)
    _worlds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
