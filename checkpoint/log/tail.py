"""Finding the newest slot of a log by asking which slots exist; nothing is listed. Pure.

Slots are filled one after another from 0; below the newest 256 only multiples of 256 remain. So the
multiples of 256 that exist are all of them up to the tail, and from the last of them on no slot
misses.
"""

from __future__ import annotations

from collections.abc import Callable

STRIDE = 256
"""How many of the newest slots are kept, and which of the older ones (its multiples)."""
_PROBE = 3
"""Slots looked at beyond the first missing one, to tell an end from a hole."""

Exists = Callable[[int], bool]


def find_tail(exists: Exists, hint: int | None = None) -> int | None:
    """The newest slot, None for an empty log.

    `hint` is an unproved guess: it saves questions when it is right and costs two when it is wrong.
    """
    if hint is not None and exists(hint) and not exists(floor(hint) + STRIDE):
        return _walk(exists, hint)
    if not exists(0):
        first = _beyond_hole(exists, 0)
        return None if first is None else _walk(exists, first)
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
    """From a slot to the end. A hole is stepped over: newer records tell everything; readers say so."""
    while True:
        while exists(slot + 1):
            slot += 1
        beyond = _beyond_hole(exists, slot + 1)
        if beyond is None:
            return slot
        slot = beyond


def _beyond_hole(exists: Exists, missing: int) -> int | None:
    """The next slot after one that was lost; the slot itself where another writer has filled it meanwhile."""
    for beyond in range(missing + 1, missing + 1 + _PROBE):
        if exists(beyond):
            return missing if exists(missing) else beyond
    return missing if exists(missing) else None
