"""What is known of a run, as a page shows it: plain values, within limits, gathered once."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

from torchrelay.errors import RelayError
from torchrelay.metadata.handlers import NodeTimes
from torchrelay.records import Json, dataclass
from torchrelay.runners.monitoring.status import NOT_BEGUN, Standing

T = TypeVar("T")
TEXT_LIMIT_BYTES = 256 << 10
MOST_LINES = 200_000
"""Of metrics, of events and of saves, so that no file of lines takes all memory."""


@dataclass(frozen=True)
class ReadLimits:
    """Bounds of what is read of one run."""

    epoch_rows: int = 300
    """Rows of the table of epochs, the newest ones."""
    sized_epochs: int = 24
    """Epochs whose manifest is read for sizes by blob."""
    manifest_bytes: int = 64 << 20
    stats_bytes: int = 64 << 20
    """The same for all manifests, and all `stats.json`, together."""
    normed_epochs: int = 16
    norm_bytes: int = 10**9
    """Bytes of weights that are read for norms; 0 reads none."""


@dataclass
class Troubles:
    """What could not be read, said once each, in the order in which it was met."""

    said: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Remember a sentence."""
        if text not in self.said:
            self.said.append(text)

    def tried(self, read: Callable[[], T], otherwise: T) -> T:
        """What `read` gives; `otherwise`, and the reason noted, where files are damaged or unreadable."""
        try:
            return read()
        except (RelayError, OSError) as error:
            self.note(str(error))
            return otherwise


def bounded(lines: Iterable[T], what: str, troubles: Troubles) -> Iterator[T]:
    """The first lines of a file of lines; that there are more is noted."""
    for number, line in enumerate(lines):
        if number == MOST_LINES:
            troubles.note(f"{what}: only the first {MOST_LINES} lines are shown")
            return
        yield line


def spread(items: Sequence[T], wanted: int) -> list[T]:
    """At most so many items, evenly spaced, the first and the last always among them."""
    if len(items) <= wanted or wanted < 2:
        return list(items[-wanted:]) if wanted > 0 else []
    last = len(items) - 1
    return [items[round(index * last / (wanted - 1))] for index in range(wanted)]


def small_text(path: Path, limit: int = TEXT_LIMIT_BYTES) -> str | None:
    """The beginning of a text file; None for anything else: links lead out of the run."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(limit).decode(errors="replace")
    return None


@dataclass(frozen=True)
class Point:
    """One epoch as a start of the run measured it. Values may be nan or infinite."""

    epoch: int
    generation: int
    time: float | None
    saved: bool | None
    metrics: Mapping[str, float]
    step: int | None = None
    """The step of the whole run at which it ended; None where no steps were counted."""


@dataclass(frozen=True)
class StepPoint:
    """Metrics within an epoch, at a step of the whole run. Values may be nan or infinite."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Joint:
    """Where a later start resumed: `kind` is `resume`, `rewind` or `fallback`; `epoch` was loaded."""

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
    nodes: tuple[NodeTimes, ...]

    @property
    def slowest_secs(self) -> float:
        """What the others waited for."""
        return max(one.total_secs for one in self.nodes)

    @property
    def waiting_secs(self) -> float:
        """How much longer the slowest node took than the quickest."""
        return self.slowest_secs - min(one.total_secs for one in self.nodes)


@dataclass(frozen=True)
class RunAttempt:
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
    standing: str
    reason: str
    marks: tuple[str, ...]
    attempt_name: str
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
class Launch:
    """What a start recorded about itself; `params` is None where the program passed none."""

    attempt: int
    argv: tuple[str, ...]
    params: Mapping[str, Any] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Directory, host and versions, by name."""


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
    launches: tuple[Launch, ...] = ()
    """One per start that was recorded, the newest last."""
    config: str | None = None
    course: Course = Course()
    steps: tuple[StepPoint, ...] = ()
    attempts: tuple[RunAttempt, ...] = ()
    events: tuple[Event, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    epochs_left_out: int = 0
    start_now: str = ""
    branches: tuple[BranchNote, ...] = ()
    happened: tuple[Event, ...] = ()
    save_times: tuple[Save, ...] = ()
    """Those of committed positions, by the `stats.json` of their attempts."""
    sizes: tuple[EpochBytes, ...] = ()
    norms: Norms = Norms()
    upstream: tuple[tuple[str, str], ...] = ()
    """Names and texts of the stages that this run was made from, as its `lineage/` says."""
    trouble: tuple[str, ...] = ()

    @property
    def best_point(self) -> tuple[int, float] | None:
        """The epoch with the best value of the run's own metric, the earliest on a tie."""
        if self.best is None:
            return None
        name, mode = self.best
        sign = -1.0 if mode == "max" else 1.0
        known = [(sign * one.metrics[name], one.epoch) for one in self.course.points if name in one.metrics]
        known = [pair for pair in known if pair[0] == pair[0]]
        return (min(known)[1], sign * min(known)[0]) if known else None


_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How JSON, which has no such numbers, writes them (`metadata.fs.finite`)."""


def moment_of(line: Mapping[str, Json]) -> float | None:
    """The time of a line, where it is one."""
    found = line.get("time")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return float(found) if abs(found) < 1e12 else None


def point_of(generation: int, line: Mapping[str, Json]) -> Point | None:
    """A line of a metrics file; None for one without an epoch."""
    epoch, metrics = line.get("epoch"), line.get("metrics")
    if type(epoch) is not int or not 0 <= epoch < 10**8:
        return None
    saved, known = line.get("saved"), metrics_in(metrics if isinstance(metrics, Mapping) else {})
    step = line.get("step")
    step = step if type(step) is int and 0 < step < 10**12 else None
    return Point(epoch, generation, moment_of(line), saved if isinstance(saved, bool) else None, known, step)


def metrics_in(said: Mapping[str, Json]) -> dict[str, float]:
    """The metrics of a line whose values are numbers."""
    found = {}
    for name, value in said.items():
        if isinstance(value, str) and value in _NAMES:
            found[str(name)] = _NAMES[value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                found[str(name)] = float(value)
            except OverflowError:
                found[str(name)] = math.inf if value > 0 else -math.inf
    return found


def course_of(
    starts: Iterable[tuple[int, Sequence[Point]]], rewinds: Mapping[int, tuple[int, bool]]
) -> Course:
    """What counts and what was replaced: a later start makes older epochs from its first one on obsolete.

    `starts` are generations in order with their points; `rewinds` has, by generation, the epoch that the log
    says a start went back to, and whether damage forced it to.
    """
    line: list[Point] = []
    abandoned: list[tuple[Point, ...]] = []
    joints: list[Joint] = []
    for generation, points in starts:
        if not points:
            continue
        first = points[0].epoch
        kept = [one for one in line if one.epoch < first]
        gone = line[len(kept) :]
        if gone:
            abandoned.append((*kept[-1:], *gone))
        if generation in rewinds:
            epoch, forced = rewinds[generation]
            joints.append(Joint("fallback" if forced else "rewind", epoch, generation))
        elif line:
            joints.append(Joint("rewind" if gone else "resume", max(0, first - 1), generation))
        known = {one.epoch: one for one in points}  # of an epoch measured twice the later counts
        line = [*kept, *(known[epoch] for epoch in sorted(known))]
    return Course(tuple(line), tuple(abandoned), tuple(joints))
