"""Finding the newest slot of a log by asking which slots exist; nothing is listed. Pure.

Slots are filled one after another from 0; below the newest 256 only multiples of 256 remain. So the
multiples of 256 that exist are all of them up to the tail, and from the last of them on no slot
misses.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.errors import DamagedError

STRIDE = 256
"""How many of the newest slots are kept, and which of the older ones (its multiples)."""
_PROBE = 3
"""Slots looked at beyond the first missing one, to tell an end from a hole."""

Exists = Callable[[int], bool]


def find_tail(exists: Exists, hint: int | None = None) -> int | None:
    """The newest slot, None for an empty log.

    `hint` is an unproved guess: it saves questions when it is right and costs two when it is wrong.
    Raises DamagedError when a slot is missing that newer ones stand on.
    """
    if hint is not None and exists(hint) and not exists(floor(hint) + STRIDE):
        return _walk(exists, hint)
    if not exists(0):
        _check_no_hole(exists, 0)
        return _walk(exists, 0) if exists(0) else None
    return _walk(exists, _last_multiple(exists))


def floor(slot: int) -> int:
    """The last multiple of 256 at or below a slot."""
    return slot - slot % STRIDE


def chain_end(slot: int) -> int:
    """Down to which slot the predecessors of `slot` are checked: the last multiple of 256 below it."""
    return floor(slot - 1) if slot else 0


def _last_multiple(exists: Exists) -> int:
    high = 1
    while exists(high * STRIDE):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle * STRIDE) else (low, middle)
    return low * STRIDE


def _walk(exists: Exists, slot: int) -> int:
    while True:
        while exists(slot + 1):
            slot += 1
        _check_no_hole(exists, slot + 1)
        if not exists(slot + 1):
            return slot


def _check_no_hole(exists: Exists, missing: int) -> None:
    """Refuse a hole; a slot that another writer has filled meanwhile is none."""
    for beyond in range(missing + 1, missing + 1 + _PROBE):
        if exists(beyond) and not exists(missing):
            raise DamagedError(
                f"the log has slot {beyond} but not slot {missing} below it: a record was lost; restore "
                f"log/{missing:020d}.json from a copy, or move the newer records away to go on without them"
            )
