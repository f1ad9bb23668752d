"""Which faults are tried: every boundary of a scenario, or a sample of all that there are, by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from torchrelay.runners.chaos.calls import Call
from torchrelay.runners.chaos.fault import ERRNOS, Fault
from torchrelay.runners.chaos.scenarios import Prepared

_ONCE = ("EINTR",)
"""Errors that say "again": for good they would only say that the system hangs."""
_CHANGING = ("create", "write", "sync", "link", "rename", "unlink", "mkdir", "rmdir", "truncate", "close")


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


def cuts(calls: Sequence[Call]) -> Iterator[Fault]:
    """Before and after every call that changes something."""
    for call in calls:
        if call.kind in _CHANGING:
            yield Fault("pause", call.number)
            yield Fault("pause", call.number, "after")


KINDS = {"kill": kills, "errno": errnos, "read": unread, "stall": stalls}


def drawn(
    kind: str, prepared: Sequence[Prepared], trials: int | None, seed: int
) -> list[tuple[Prepared, Fault]]:
    """All faults of a kind in all scenarios, or `trials` of them, the same for the same seed.

    A sample takes turns between the scenarios, so that a few trials reach each. More trials than there are
    faults begin again: threads never meet in the same way twice.
    """
    rows = [
        [(one, fault) for fault in KINDS[kind](one.reads if kind == "read" else one.calls)]
        for one in prepared
    ]
    if trials is None:
        return [pair for row in rows for pair in row]
    chance = random.Random(f"{seed}/{kind}")  # noqa: S311 - chance, no secret
    found: list[tuple[Prepared, Fault]] = []
    while len(found) < trials and any(rows):
        for row in rows:
            chance.shuffle(row)
        longest = max(map(len, rows))
        found += [row[turn] for turn in range(longest) for row in rows if turn < len(row)]
    return found[:trials]
