"""Metrics of epochs, from their manifests, for a retention that keeps the best by one of them.

A manifest is read once, for what is committed never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.log.retention import Best, Keeping, Scores
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage

_EXPECTED = 3
"""So many positions may well have no metrics: the first state, and epochs that were not evaluated."""


class KnownMetrics:
    """Metrics of the healthy whole epochs of the current branch, as far as they were read."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, float]] = {}
        self._unread: dict[Entry, OSError] = {}

    def look(self, storage: Storage, view: LogView) -> None:
        """Read what is not known yet; what cannot be read is asked for again the next time."""
        line = [entry for entry in view.line() if entry.position.boundary and entry.healthy]
        self._known = {one.try_name: self._known[one.try_name] for one in line if one.try_name in self._known}
        self._unread = {}
        for entry in line:
            if entry.try_name in self._known:
                continue
            try:
                self._known[entry.try_name] = codec.read(storage, entry).facts.metrics
            except OSError as error:
                self._unread[entry] = error

    def told(self, keeping: Keeping) -> Keeping:
        """The same rules, knowing the scores that they ask for."""
        if keeping.best is None:
            return keeping
        unread = frozenset(entry.try_name for entry in self._unread)
        return replace(keeping, scores=Scores(self._values(keeping.best), unread))

    def missing(self, best: Best) -> str:
        """Why no epoch is the best, for people; empty where one is."""
        if self._unread or any(map(math.isfinite, self._values(best).values())):
            return ""
        names = sorted({name for found in self._known.values() for name in found})
        there = ", ".join(names) or "none at all"
        return f"no epoch has a finite value of metric {best.metric!r}; there is {there}"

    def doubts(self, best: Best) -> Iterator[str]:
        """What keeps epochs that might have to go, for people."""
        if len(self._known) > _EXPECTED and (missing := self.missing(best)):
            yield f"{missing}: as long as none is known to be the best, all stay"
        for entry, error in self._unread.items():
            yield f"epoch {entry.position} may be the best and stays: its metrics cannot be read ({error})"

    def _values(self, best: Best) -> dict[str, float]:
        return {name: found[best.metric] for name, found in self._known.items() if best.metric in found}
