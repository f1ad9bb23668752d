"""Figures of the rounds: medians, ranges, ratios to the best peer, shares of the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.plan import Workload
from bench.rounds import Round

OURS = "torchrelay"
MOVES = {"save": "write", "save again": "write", "cold load": "cold", "warm load": "warm"}
"""Which limit of the device stands beside which actions, by how their names end."""
NO_RACE = ("gate", "slowdown", "noise of the slowdown", "step alone")
"""Actions without a best one: differences from zero, and facts of the harness."""


@dataclass(frozen=True)
class Figure:
    """One engine and action. `ratio` is the best peer's median by this one: above 1 it is quicker.

    `ratios` is the range of the same ratio within each round, to the same peer; `limit` the median share
    of what the device did right before, `least` the median of what the same processes needed right after
    for as many bytes alone (`bench.least`). Without figures, `failed` says why; with some, it says what
    happened in other rounds.
    """

    workload: str
    action: str
    engine: str
    secs: tuple[float, ...]
    best_peer: str | None = None
    ratio: float | None = None
    ratios: tuple[float, float] | None = None
    limit: float | None = None
    extra_memory: float | None = None
    bytes: float | None = None
    least: float | None = None
    failed: str | None = None

    @property
    def median(self) -> float | None:
        """The median of all rounds."""
        return median(self.secs) if self.secs else None


def figures_of(workload: Workload, rounds: Sequence[Round], scale: float) -> list[Figure]:
    """All figures of a workload, action by action, in the order in which the actions were measured."""
    actions: dict[str, None] = {}
    engines: dict[str, None] = {}
    for one in rounds:
        engines.update(dict.fromkeys(sorted(one.cells, key=lambda name: _place(workload, name))))
        for told in one.cells.values():
            actions.update(dict.fromkeys(told))
    # A start that failed is known by its step; its figures have finer names.
    named = [action for action in actions if any(_secs(rounds, e, action) for e in engines)] or list(actions)
    found: list[Figure] = []
    for action in named:
        best = None if action in NO_RACE else _best_peer(rounds, list(engines), action)
        for engine in engines:
            found.append(_figure(workload, rounds, scale, action, engine, best))
    return found


def _figure(
    workload: Workload, rounds: Sequence[Round], scale: float, action: str, engine: str, best: str | None
) -> Figure:
    secs = _secs(rounds, engine, action)
    times = tuple(secs.values())
    peer = _secs(rounds, best, action) if best else {}
    pairs = [peer[number] / mine for number, mine in secs.items() if number in peer and mine > 0]
    comparable = bool(peer) and bool(times) and median(times) > 0 and median(peer.values()) > 0
    return Figure(
        workload.name,
        action,
        engine,
        times,
        best,
        median(peer.values()) / median(times) if comparable else None,
        (min(pairs), max(pairs)) if comparable and pairs else None,
        _share(workload, rounds, scale, action, secs),
        _middle(rounds, engine, action, "extra_memory"),
        _middle(rounds, engine, action, "bytes"),
        _middle(rounds, engine, action, "least"),
        _failure(rounds, engine, action),
    )


def _place(workload: Workload, engine: str) -> int:
    return workload.engines.index(engine) if engine in workload.engines else len(workload.engines)


def _secs(rounds: Sequence[Round], engine: str, action: str) -> dict[int, float]:
    """Seconds by round."""
    told = {one.number: one.cells.get(engine, {}).get(action, {}) for one in rounds}
    return {number: float(cell["secs"]) for number, cell in told.items() if "secs" in cell}


def _best_peer(rounds: Sequence[Round], engines: Sequence[str], action: str) -> str | None:
    medians = {
        engine: median(secs.values())
        for engine in engines
        if not engine.startswith(OURS) and (secs := _secs(rounds, engine, action))
    }
    return min(medians, key=lambda engine: medians[engine]) if medians else None


def _middle(rounds: Sequence[Round], engine: str, action: str, what: str) -> float | None:
    told = [one.cells.get(engine, {}).get(action, {}).get(what) for one in rounds]
    known = [value for value in told if value is not None]
    return median(known) if known else None


def _failure(rounds: Sequence[Round], engine: str, action: str) -> str | None:
    """The first failure of this action, or of the start that would have measured it."""
    for one in rounds:
        told = one.cells.get(engine, {})
        if "failed" in told.get(action, {}):
            return str(told[action]["failed"])
        if action not in told:
            return next((str(cell["failed"]) for cell in told.values() if "failed" in cell), None)
    return None


def _share(
    workload: Workload, rounds: Sequence[Round], scale: float, action: str, secs: dict[int, float]
) -> float | None:
    """The bytes that must move, by what the device moves; None for what moves no known number of bytes."""
    limit = next((limit for end, limit in MOVES.items() if action.endswith(end)), None)
    if limit is None or action == "first save":
        return None
    nbytes = workload.nbytes * scale * (1.0 if limit == "write" else workload.loaded_part)
    shares = [nbytes / secs[one.number] / one.limits[limit] for one in rounds if one.number in secs]
    return median(shares) if shares else None
