"""Durations of saves and loads by node and phase, and detection of stragglers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from torchrelay.records import dataclass


@dataclass(frozen=True)
class NodeTimes:
    """One node's part of a save or load: seconds by phase, and bytes; `path` is `prefix/node.position`.

    A save has the phases stage, plan, hash, write, fsync and, on its first node, commit. A load has `prove`,
    read and restore.
    """

    node: str
    path: str
    bytes: int
    secs: dict[str, float] = field(default_factory=dict)

    @property
    def total_secs(self) -> float:
        """Sum of all phases in seconds."""
        return sum(self.secs.values())

    @property
    def epoch(self) -> int | None:
        """Epoch in the path, also of a position within an epoch; None for other paths."""
        number = self.path.rpartition(".")[2].partition("+")[0]
        return int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else None


class NodeStats(dict[str, float]):
    """Seconds by logical path, as for Caffe2's handlers, with details.

    `nodes` has the phases; `slowest` is the node that the others waited for.
    """

    def __init__(self, nodes: Iterable[NodeTimes]) -> None:
        self.nodes = tuple(nodes)
        super().__init__({times.path: times.total_secs for times in self.nodes})

    @property
    def slowest(self) -> NodeTimes | None:
        """Node with the most seconds; None without nodes."""
        return max(self.nodes, key=lambda times: times.total_secs, default=None)

    @property
    def bytes(self) -> int:
        """Bytes written or read by all nodes."""
        return sum(times.bytes for times in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `stats.json` of a save attempt."""
        slowest = self.slowest
        return {
            "bytes": self.bytes,
            "nodes": [vars(times) for times in self.nodes],
            "slowest": slowest.node if slowest else None,
        }


_LIMIT = 1 << 63
_MOST_CHARACTERS = 4096


def times_of(nodes: Any) -> list[NodeTimes]:
    """Parse the nodes of `NodeStats.to_json`; invalid ones are skipped."""
    found = []
    for one in nodes if isinstance(nodes, list) else ():
        if not isinstance(one, dict):
            continue
        secs, node, path, size = one.get("secs"), one.get("node"), one.get("path", ""), one.get("bytes", 0)
        if not (isinstance(secs, dict) and is_text(node) and isinstance(path, str) and is_count(size)):
            continue
        taken = {phase: seconds_in(value) for phase, value in secs.items() if is_text(phase)}
        known = {phase: value for phase, value in taken.items() if value is not None}
        found.append(NodeTimes(str(node), path, int(size or 0), known))
    return found


def is_text(value: object) -> bool:
    """Return True for text that every database can store, without NUL and lone surrogates."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MOST_CHARACTERS
        and "\0" not in value
        and not any("\ud800" <= one <= "\udfff" for one in value)
    )


def is_count(value: object) -> bool:
    """Return True for an integer that every database can store."""
    return type(value) is int and 0 <= value < _LIMIT


def seconds_in(value: object) -> float | None:
    """Return valid Unix seconds, or None."""
    known = type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]
    return float(value) if known else None  # type: ignore[arg-type]


WAITING = frozenset({"plan", "commit"})
"""Phases in which nodes wait for the slowest one, so that all have its duration."""
_RATIO = 1.5
_EXCESS_SECS = 0.01


@dataclass(frozen=True)
class NodeRow:
    """A node over all actions: median and maximum seconds per phase, and own work."""

    node: str
    actions: int
    own_secs: float
    phases: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class StragglerVerdict:
    """The slowest node compared with the median of the others; `dominates` if it is significantly slower.

    `secs` and `median_secs` are medians of own work; it was slowest in `slowest_in` of `actions` actions.
    """

    node: str
    dominates: bool
    secs: float
    median_secs: float
    slowest_in: int
    actions: int
    phase: str

    @property
    def ratio(self) -> float | None:
        """Ratio to the median node's time; None if that is 0."""
        return self.secs / self.median_secs if self.median_secs > 0 else None


@dataclass(frozen=True)
class StragglerSummary:
    """Nodes, slowest first; `shares` are fractions of the total seconds; no verdict for a single node."""

    actions: int
    phases: tuple[str, ...]
    nodes: tuple[NodeRow, ...]
    shares: Mapping[str, float]
    verdict: StragglerVerdict | None


def summary(actions: Sequence[Sequence[NodeTimes]]) -> StragglerSummary:
    """Summarise several saves or several loads."""
    by_node: dict[str, list[NodeTimes]] = {}
    for times in actions:
        for one in times:
            by_node.setdefault(one.node, []).append(one)
    phases = tuple(dict.fromkeys(phase for times in actions for one in times for phase in one.secs))
    rows = sorted((_row(node, found) for node, found in by_node.items()), key=lambda row: -row.own_secs)
    return StragglerSummary(
        len(actions), phases, tuple(rows), _shares(actions, phases), _verdict(actions, rows)
    )


def _row(node: str, found: Sequence[NodeTimes]) -> NodeRow:
    from statistics import median  # only reports need it: a start of a run does not import it

    phases = dict.fromkeys(phase for one in found for phase in one.secs)
    spent = {phase: [one.secs.get(phase, 0.0) for one in found] for phase in phases}
    return NodeRow(
        node,
        len(found),
        median(map(own_secs, found)),
        {phase: (median(secs), max(secs)) for phase, secs in spent.items()},
    )


def own_secs(times: NodeTimes) -> float:
    """Return the seconds of a node's own work, without waiting."""
    return sum(secs for phase, secs in times.secs.items() if phase not in WAITING)


def _shares(actions: Iterable[Sequence[NodeTimes]], phases: Iterable[str]) -> Mapping[str, float]:
    spent = dict.fromkeys(phases, 0.0)
    for times in actions:
        for one in times:
            for phase, secs in one.secs.items():
                spent[phase] += secs
    whole = sum(spent.values())
    return {phase: secs / whole if whole > 0 else 0.0 for phase, secs in spent.items()}


def _verdict(actions: Sequence[Sequence[NodeTimes]], rows: Sequence[NodeRow]) -> StragglerVerdict | None:
    if len(rows) < 2:
        return None
    from statistics import median

    slowest = rows[0]
    typical = median(row.own_secs for row in rows[1:])
    excess = {
        phase: secs - median(row.phases.get(phase, (0.0, 0.0))[0] for row in rows[1:])
        for phase, (secs, _) in slowest.phases.items()
        if phase not in WAITING
    }
    last = Counter(max(times, key=own_secs).node for times in actions if times)
    much = slowest.own_secs >= _RATIO * typical and slowest.own_secs - typical >= _EXCESS_SECS
    return StragglerVerdict(
        slowest.node,
        much,
        slowest.own_secs,
        typical,
        last[slowest.node],
        len(actions),
        max(excess, key=lambda phase: excess[phase], default=""),
    )
