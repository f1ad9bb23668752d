"""Numbers of steps to numbers of an epoch: reduced on the way, or kept one by one until the epoch ends.

A reduction is one of `mean sum last min max` (done by the log that it is given to), `all` (the values
themselves are the result), or a callable that makes a number of the list of all values of all ranks, in the
order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torchrelay.errors import UsageError
from torchrelay.jobs.session import Peers

ALL = "all"
Reduction = str | Callable[[list[float]], Any]


class Log(Protocol):
    """What takes numbers: `ctx`, or a log of its own."""

    def log(self, name: str, value: Any, reduce: Any = "mean", weight: Any = 1) -> None:
        """Take one."""


class Collected:
    """Values of the running epoch kept one by one; state, so that it can go on in its middle."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> None:
        """Keep a number, or a tensor of numbers; where it is, nothing is waited for."""
        self.values.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)

    def drop(self, stream: str) -> None:
        """Forget what one stream has."""
        self.values = {name: one for name, one in self.values.items() if not name.startswith(f"{stream}/")}

    def take(self, stream: str) -> dict[str, list[float]]:
        """Hand out what one stream has, as plain numbers, and forget it."""
        found = {name: _flat(one) for name, one in self.values.items() if name.startswith(f"{stream}/")}
        self.drop(stream)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The values up to now."""
        return {"values": {name: [_told(one) for one in _flat(it)] for name, it in self.values.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.values = {name: [float(one) for one in it] for name, it in state["values"].items()}


class Collector:
    """Sends what steps measured where its reduction says."""

    def __init__(self, reductions: Mapping[str, Reduction], collected: Collected) -> None:
        self._reductions, self.collected = dict(reductions), collected

    @property
    def keeps(self) -> bool:
        """Whether any reduction needs the values one by one."""
        return any(_keeps(one) for one in self._reductions.values())

    def add(self, log: Log, stream: str, values: Mapping[str, Any], weight: Any) -> None:
        """Take what one step measured; `weight` is for means. Raises UsageError for what is no mapping."""
        if not isinstance(values, Mapping):
            raise UsageError(f"a step of {stream} returned {values!r:.60}; return a dict of named numbers")
        for name, value in values.items():
            reduction = self._of(stream, name)
            if _keeps(reduction):
                self.collected.add(f"{stream}/{name}", value)
            else:
                log.log(f"{stream}/{name}", value, reduce=reduction, weight=weight)

    def finish(self, log: Log, stream: str, peers: Peers) -> dict[str, list[float]]:
        """End an epoch of a stream: reduce what was kept, on all ranks; returns what stays one by one."""
        if not self.keeps:
            return {}
        own = {name: [_told(one) for one in it] for name, it in self.collected.take(stream).items()}
        told = peers.exchange(f"values of {stream}", own) if peers.size > 1 else [own]
        stays = {}
        for full in sorted({name for one in told for name in one}):
            values = [float(value) for one in told for value in one.get(full, ())]
            name = full.removeprefix(f"{stream}/")
            reduction = self._of(stream, name)
            if callable(reduction):
                log.log(full, reduction(values), reduce="last")
            else:
                stays[name] = values
        return stays

    def _of(self, stream: str, name: str) -> Reduction:
        """What is said of `val/score` counts before what is said of `score`."""
        return self._reductions.get(f"{stream}/{name}", self._reductions.get(name, "mean"))


def told_values(values: Mapping[str, list[float]]) -> dict[str, list[float | str]]:
    """For JSON, which has no NaN."""
    return {name: [_told(one) for one in it] for name, it in values.items()}


def _keeps(reduction: Reduction) -> bool:
    return reduction == ALL or callable(reduction)


def _told(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _flat(values: list[Any]) -> list[float]:
    found: list[float] = []
    for one in values:
        found.extend(map(float, one.reshape(-1).tolist()) if hasattr(one, "reshape") else [float(one)])
    return found
