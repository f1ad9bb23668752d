"""What is known of a run, as the page shows it: plain values, gathered once, drawn without reading more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torchrelay.records import dataclass
from torchrelay.runners.monitoring.status import NOT_BEGUN, Standing


@dataclass(frozen=True)
class Point:
    """One epoch as a start of the run measured it. Values may be nan or infinite."""

    epoch: int
    generation: int
    time: float | None
    saved: bool | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepPoint:
    """Metrics within an epoch, at a step of the whole run. Values may be nan or infinite."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Joint:
    """Where a later start went on: `kind` is `resume`, `rewind` or `fallback`; `epoch` is what it loaded."""

    kind: str
    epoch: int
    generation: int


@dataclass(frozen=True)
class Course:
    """The epochs that count, in order, and those that a later start replaced.

    Each of `abandoned` begins with the last point before it that still counts, if there is one.
    """

    points: tuple[Point, ...] = ()
    abandoned: tuple[tuple[Point, ...], ...] = ()
    joints: tuple[Joint, ...] = ()


@dataclass(frozen=True)
class Save:
    """One save or load: seconds by node and phase; `end` by the clock of rank 0's host, where noted."""

    kind: str
    end: float | None
    nodes: Mapping[str, Mapping[str, float]]
    nbytes: int

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds by node."""
        return {node: sum(secs.values()) for node, secs in self.nodes.items()}

    @property
    def slowest_secs(self) -> float:
        """What the others waited for."""
        return max(self.totals.values(), default=0.0)

    @property
    def waiting_secs(self) -> float:
        """How much longer the slowest node took than the quickest."""
        totals = self.totals.values()
        return max(totals, default=0.0) - min(totals, default=0.0)


@dataclass(frozen=True)
class SavedEpoch:
    """The save of one committed position, by the try's own `stats.json`."""

    position: str
    branch: int
    save: Save


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `outcome` is its state at the end, `DIED` where it left no word, or `RUNNING`."""

    generation: int
    number: int | None
    begin: float
    end: float
    outcome: str
    reason: str
    world_size: int | None
    points: tuple[Point, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened, for people."""

    time: float | None
    kind: str
    text: str
    generation: int


@dataclass(frozen=True)
class EpochRow:
    """A committed position: `standing` is one word, `reason` says why it is used or not."""

    name: str
    branch: int
    epoch: int
    step: int
    health: str
    standing: str
    reason: str
    marks: tuple[str, ...]
    try_name: str
    metrics: Mapping[str, float]
    nbytes: int | None


@dataclass(frozen=True)
class BranchNote:
    """A branch: where it began and how. Of its `epochs` that the log has those `abandoned` do not count."""

    id: int
    parent: int | None
    base: str | None
    how: str
    epochs: tuple[int, ...]
    abandoned: frozenset[int]
    current: bool


@dataclass(frozen=True)
class BlobBytes:
    """The bytes of one blob at one epoch, of all nodes: written by this epoch, or referenced."""

    blob: str
    written: int
    referenced: int

    @property
    def total(self) -> int:
        """All bytes that the epoch consists of."""
        return self.written + self.referenced


@dataclass(frozen=True)
class EpochBytes:
    """The blobs of one epoch."""

    epoch: int
    blobs: tuple[BlobBytes, ...]


@dataclass(frozen=True)
class LeafNorm:
    """A weight tensor at one epoch. `update` is the norm of its change since the sampled epoch before."""

    epoch: int
    leaf: str
    elements: int
    norm: float
    update: float | None
    nonfinite: int


@dataclass(frozen=True)
class Norms:
    """Norms of sampled epochs; `left_out` says what was not read and why, None where nothing was."""

    rows: tuple[LeafNorm, ...] = ()
    read_bytes: int = 0
    left_out: str | None = None


@dataclass(frozen=True)
class Upstream:
    """A stage that this run was made from, as its `lineage/` says."""

    name: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """Everything that the page says of a run. `trouble` are things that could not be read, in words."""

    name: str
    path: str
    job: str | None = None
    state: str | None = None
    stands: Standing = NOT_BEGUN
    """As all verbs say it; of a run that calls itself RUNNING it may be another word."""
    epoch: int | None = None
    created: float | None = None
    updated: float | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    best: tuple[str, str] | None = None
    hosts: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    course: Course = Course()
    steps: tuple[StepPoint, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    events: tuple[Event, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    epochs_left_out: int = 0
    start_now: str = ""
    branches: tuple[BranchNote, ...] = ()
    happened: tuple[Event, ...] = ()
    save_times: tuple[SavedEpoch, ...] = ()
    sizes: tuple[EpochBytes, ...] = ()
    norms: Norms = Norms()
    upstream: tuple[Upstream, ...] = ()
    trouble: tuple[str, ...] = ()

    @property
    def saves(self) -> tuple[Save, ...]:
        """All saves of all starts."""
        return tuple(one for attempt in self.attempts for one in attempt.saves if one.kind == "save")

    @property
    def best_point(self) -> tuple[int, float] | None:
        """The epoch with the best value of the run's own metric, the first of equal ones."""
        if self.best is None:
            return None
        name, mode = self.best
        sign = -1.0 if mode == "max" else 1.0
        known = [(sign * one.metrics[name], one.epoch) for one in self.course.points if name in one.metrics]
        known = [pair for pair in known if pair[0] == pair[0]]
        return (min(known)[1], sign * min(known)[0]) if known else None
