"""Schedules of store faults: drawn from a seed, printable, and counted when injected."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from store_proxy import FAULTS, Asked

OFTEN = {"500": 3, "503": 3, "reset before": 3, "reset after": 4, "silence": 1, "slow": 1, "cut": 3}
"""How often each is drawn; silence costs the patience of the client."""
_KINDS = {"any": (150, 6), "create": (8, 3), "write": (20, 3)}
"""Requests of a kind that a call is thought to have, and how often faults are dealt to them."""
_READS_ONLY = frozenset({"cut", "slow"})
_AWAY_EVERY = 0.1
_AWAY = 400
"""Requests in a row that are refused when the store is away: more than a call has patience for."""
assert set(OFTEN) == set(FAULTS)


class At(NamedTuple):
    """The request of a call that is struck: the n-th, or the n-th that creates or writes."""

    kind: str
    number: int


Faults = Mapping[At, str]


def drawn(dice: random.Random, most: int) -> dict[At, str]:
    """Up to `most` faults of a call, single ones and some in a row; or the store goes away in the middle."""
    if dice.random() < _AWAY_EVERY:
        begin, fault = dice.randrange(_KINDS["any"][0] // 2), dice.choice(("503", "reset before"))
        return {At("any", number): fault for number in range(begin, begin + _AWAY)}
    found: dict[At, str] = {}
    left = dice.randint(0, most)
    while left > 0:
        kind = dice.choices(list(_KINDS), [often for _, often in _KINDS.values()])[0]
        at, row = dice.randrange(_KINDS[kind][0]), min(left, dice.choice((1, 1, 1, 2, 3)))
        fault = dice.choices(list(OFTEN), list(OFTEN.values()))[0]
        found |= {At(kind, number): fault for number in range(at, at + row)}
        left -= row
    return found


def told(faults: Faults) -> str:
    """As people read it: which request, and its fault."""
    if len(faults) >= _AWAY:
        return f"the store is away ({faults[min(faults)]}) from request {min(faults).number}"
    return ", ".join(f"{at.kind} {at.number}: {fault}" for at, fault in sorted(faults.items())) or "none"


@dataclass
class Striking:
    """A schedule of the proxy that strikes the requests of one call after another.

    What can only happen to an answer with bytes happens to the next read. `dealt` counts what was ordered.
    """

    dealt: int = 0
    _faults: Faults = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _owed: list[str] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def begin(self, faults: Faults) -> None:
        """From now on requests count from 0 again, and meet these."""
        with self._lock:
            self._faults, self._owed = faults, []
            self._counts.clear()

    def __call__(self, asked: Asked) -> str:
        """The fault of a request."""
        kinds = ["any", *(["write"] if asked.method in ("PUT", "POST") else [])]
        kinds += ["create"] if asked.conditional else []
        with self._lock:
            found = [self._faults.get(At(kind, self._counts[kind]), "") for kind in kinds]
            self._counts.update(kinds)
            fault = next(filter(None, found), "")
            if fault in _READS_ONLY and asked.method != "GET":
                self._owed.append(fault)
                fault = ""
            if not fault and self._owed and asked.method == "GET":
                fault = self._owed.pop()
            self.dealt += bool(fault)
            return fault
