"""Which faults are tried: every boundary of a scenario, or a sample of all that there are, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torchrelay.runners.chaos.calls import Call
from torchrelay.runners.chaos.fault import ERRNOS, STORE_ERRNOS, Fault
from torchrelay.runners.chaos.trial import Ready

_ONCE = ("EINTR",)
"""Errors that say "again": for good they would only say that the system hangs."""
_AFTERWARDS = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET")
"""What a store may answer although it has done what it was asked for."""


def kills(calls: Sequence[Call]) -> Iterator[Fault]:
    """Before and after every call, and in the middle of every write."""
    for call in calls:
        yield Fault("kill", call.number)
        yield Fault("kill", call.number, "after")
        if call.kind == "write":
            yield Fault("kill", call.number, "middle")


def errnos(calls: Sequence[Call]) -> Iterator[Fault]:
    """Every error at every call, once and for good; short and empty writes."""
    for call in calls:
        whats = (*ERRNOS, "short", "zero") if call.kind == "write" else ERRNOS
        for what in whats:
            yield Fault(what, call.number)
            if what not in _ONCE:
                yield Fault(what, call.number, lasting=True)


def unread(calls: Sequence[Call]) -> Iterator[Fault]:
    """Reads that fail, once and for good, or give half; for calls that were counted with reads."""
    for call in calls:
        if call.kind == "read":
            yield from (Fault(what, call.number, reads=True) for what in ("EIO", "ESTALE", "EINTR", "short"))
            yield from (Fault(what, call.number, lasting=True, reads=True) for what in ("EIO", "short"))


def stalls(calls: Sequence[Call]) -> Iterator[Fault]:
    """A pause at every call."""
    for call in calls:
        yield Fault("stall", call.number)


def store_kills(calls: Sequence[Call]) -> Iterator[Fault]:
    """Before and after every call to a store."""
    for call in calls:
        yield Fault("kill", call.number)
        yield Fault("kill", call.number, "after")


def store_errnos(calls: Sequence[Call]) -> Iterator[Fault]:
    """Every error at every call to a store, once and for good; the answer lost after the call was done."""
    for call in calls:
        for what in STORE_ERRNOS:
            yield Fault(what, call.number)
            yield Fault(what, call.number, lasting=True)
            if what in _AFTERWARDS:
                yield Fault(what, call.number, "after")


def store_unread(calls: Sequence[Call]) -> Iterator[Fault]:
    """Half of the bytes that were asked for; listings that lack what is there, once and for good.

    Bytes that are always cut short are what damage is, and are taken for it.
    """
    for call in calls:
        if call.kind == "read":
            yield Fault("short", call.number, reads=True)
        if call.kind == "list":
            yield Fault("stale", call.number, reads=True)
            yield Fault("stale", call.number, lasting=True, reads=True)


Faults = Callable[[Sequence[Call]], Iterator[Fault]]
KINDS: Mapping[str, Faults] = {"kill": kills, "errno": errnos, "read": unread, "stall": stalls}
STORE_KINDS: Mapping[str, Faults] = {
    "kill": store_kills, "errno": store_errnos, "read": store_unread, "stall": stalls,
}  # fmt: skip
T = TypeVar("T", bound=Ready)


def drawn(
    kind: str, faults: Faults, prepared: Sequence[T], trials: int | None, seed: int
) -> list[tuple[T, Fault]]:
    """All faults of a kind in all scenarios, or `trials` of them, the same for the same seed.

    A sample takes turns between the scenarios, so that a few trials reach each. More trials than there are
    faults begin again: threads never meet in the same way twice.
    """
    rows = [
        [(one, fault) for fault in faults(one.reads if kind == "read" else one.calls)] for one in prepared
    ]
    if trials is None:
        return [pair for row in rows for pair in row]
    chance = random.Random(f"{seed}/{kind}")  # noqa: S311 - chance, no secret
    found: list[tuple[T, Fault]] = []
    while len(found) < trials and any(rows):
        for row in rows:
            chance.shuffle(row)
        longest = max(map(len, rows))
        found += [row[turn] for turn in range(longest) for row in rows if turn < len(row)]
    return found[:trials]
