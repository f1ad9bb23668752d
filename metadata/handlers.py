"""Metadata handlers: a protocol by which an external store follows a job, and durations of saves and loads.

A handler stores epochs and durations, and may override the resume decision. It is called only on the main
thread of rank 0. An exception in `write` or `report` becomes a warning; one in `set_params` or `last_epoch`
ends the run.

Optional members:

- `decides`: True if `last_epoch` decides where a run resumes. By default it does for a manager's handler, as
  in Caffe2, and does not for a handler of a run directory.
- `opened(holder)`: called before `write` and `report` with the holder of the checkpoint log.

`metadata.jsonl` can be read back as events, to rebuild an index.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchrelay.errors import RelayError
from torchrelay.metadata.fs import SamePlace, append_lines, read_lines
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Holder:
    """Holder of a checkpoint log: the job's `uuid`, which is fixed for the directory, and its `name`.

    `generation` counts launches; `branch` was created by a rewind to epoch `base` (None: from scratch).
    """

    uuid: str
    name: str
    generation: int
    branch: int = 0
    base: int | None = None


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
    """Seconds by logical path, as for Caffe2's handlers; `nodes` has the phases."""

    def __init__(self, nodes: Iterable[NodeTimes]) -> None:
        self.nodes = tuple(nodes)
        super().__init__({times.path: times.total_secs for times in self.nodes})

    @property
    def slowest(self) -> NodeTimes | None:
        """Node with the most seconds, which the others waited for; None without nodes."""
        return max(self.nodes, key=lambda times: times.total_secs, default=None)

    @property
    def bytes(self) -> int:
        """Bytes written or read by all nodes."""
        return sum(times.bytes for times in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `stats.json` of a save attempt."""
        slowest = self.slowest.node if self.slowest else None
        return {"bytes": self.bytes, "nodes": [vars(one) for one in self.nodes], "slowest": slowest}


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
    return type(value) is int and 0 <= value < 1 << 63


def seconds_in(value: object) -> float | None:
    """Return valid Unix seconds, or None."""
    known = type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]
    return float(value) if known else None  # type: ignore[arg-type]


@runtime_checkable
class MetadataHandler(Protocol):
    """Protocol of metadata handlers."""

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Set where this job keeps its checkpoints; called first, once per train.

        Args:
            db_prefix: Directory or URL of the checkpoints.
            db_type: The storage format, "torchrelay".
            node_names: The nodes whose state is saved.
            path_prefix: What the manager was given, as in Caffe2.
            path_type: What the manager was given, as in Caffe2.

        Example:
            handler.set_params("runs/a/checkpoints", "torchrelay", ["trainer_0"])
        """

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the epoch to resume from, given the user's choice; None starts from scratch."""

    def write(self, epoch: int) -> None:
        """Record that `epoch` is committed; may be called again for the same epoch."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Record how long an action took.

        Args:
            action: `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.
            stats: Seconds by logical path; torchrelay passes a `NodeStats`, which also has phases, bytes and
                the slowest node.

        Example:
            handler.report("checkpoint_save", {"runs/a/checkpoints/trainer_0.7": 0.4})
        """

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True if a save may be attempted now; False skips it with a warning."""


EPOCH = "epoch"


@dataclass(frozen=True)
class HandlerEvent:
    """One call of a handler: `kind` is `epoch` or the action of a report.

    `prefix` is the location of the checkpoints, `time` is in Unix seconds, `nodes` counts those of an epoch.
    """

    holder: Holder
    prefix: str
    kind: str
    epoch: int
    time: float = 0.0
    nodes: int = 0
    times: tuple[NodeTimes, ...] = ()

    @property
    def key(self) -> tuple[int, int, str]:
        """Unique key within its job."""
        return (self.holder.generation, self.epoch, self.kind)


def report_notes(
    holder: Holder, prefix: str, action: str, nodes: Sequence[NodeTimes], time: float
) -> list[HandlerEvent]:
    """Return the event of a report, or none if the paths have no epoch."""
    epochs = {one.epoch for one in nodes}
    if len(epochs) != 1 or (epoch := epochs.pop()) is None:
        return []
    return [HandlerEvent(holder, prefix, action, epoch, time, len(nodes), tuple(nodes))]


def notes_of_file(path: Path, job: Holder, prefix: str, limit: int | None = None) -> list[HandlerEvent]:
    """Read the last `limit` events of one job from a `metadata.jsonl`, without invalid lines."""
    found: list[HandlerEvent] = []
    for line in read_lines(path):
        found += _notes_of(line, job, prefix)
        if limit is not None and len(found) > 2 * limit:
            del found[:-limit]
    return found if limit is None else found[-limit:]


def _notes_of(line: Mapping[str, Any], job: Holder, prefix: str) -> Iterator[HandlerEvent]:
    generation, branch, base = line.get("generation"), line.get("branch"), line.get("base")
    time, kind, nodes = seconds_in(line.get("time")), line.get("kind"), line.get("nodes")
    counts = (generation, branch, 0 if base is None else base)
    if line.get("job") != job.uuid or not all(map(is_count, counts)):
        return
    if time is None or not (is_text(kind) and isinstance(nodes, list)):
        return
    holder = replace(job, generation=int(generation or 0), branch=int(branch or 0), base=base)
    if kind != EPOCH:
        yield from report_notes(holder, prefix, str(kind), times_of(nodes), time)
    elif is_count(epoch := line.get("epoch")):
        yield HandlerEvent(holder, prefix, EPOCH, int(epoch or 0), time, len(nodes))


FILE_NAME = "metadata.jsonl"


class FileMetadataHandler:
    """Handler that writes JSON lines; it does not decide where a run resumes."""

    decides = False

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / FILE_NAME
        self._nodes: list[str] = []
        self._holder: dict[str, Any] = {}
        self._place = SamePlace(self.path.parent)

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Set the nodes, which are part of each epoch's line.

        Args:
            db_prefix: Not used.
            db_type: Not used.
            node_names: The nodes whose state is saved.
            path_prefix: Not used.
            path_type: Not used.

        Example:
            handler.set_params("runs/a/checkpoints", "torchrelay", ["trainer_0"])
        """
        self._nodes = list(node_names)

    def opened(self, holder: Holder) -> None:
        """Set the holder, which is part of each line from now on."""
        known = ("generation", "branch", "base")  # the job's name is in `run.json`
        self._holder = {"job": holder.uuid, **{name: getattr(holder, name) for name in known}}

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the user's choice: the log decides, not this file."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Record that an epoch is committed; readers use the last line of an epoch."""
        self._append({"kind": "epoch", "epoch": epoch, "nodes": self._nodes})

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Record the seconds of an action.

        Args:
            action: Its name, such as `checkpoint_save`.
            stats: Seconds by logical path.

        Example:
            handler.report("checkpoint_save", {"runs/a/checkpoints/trainer_0.7": 0.4})
        """
        details = stats.to_json() if isinstance(stats, NodeStats) else {}
        self._append({"kind": action, "secs": dict(stats), **details})

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True if the directory is writable."""
        return os.access(self.path.parent, os.W_OK | os.X_OK)

    def epochs(self) -> list[int]:
        """Return the recorded epochs, in order, without duplicates."""
        lines = [line for line in read_lines(self.path) if line.get("kind") == "epoch"]
        return sorted({line["epoch"] for line in lines if type(line.get("epoch")) is int})

    def _append(self, line: dict[str, Any]) -> None:
        self._place.check()
        append_lines(self.path, {"time": round(time.time(), 3), **self._holder, **line})


class SeveralHandlers:
    """Calls several handlers in order.

    Each that decides where a run resumes gets the answer of the previous one as the user's choice.
    """

    def __init__(self, handlers: Sequence[MetadataHandler]) -> None:
        self._all = tuple(handlers)

    @property
    def decides(self) -> bool:
        """True if one of the handlers decides."""
        return any(getattr(one, "decides", False) for one in self._all)

    def set_params(self, *args: Any, **params: Any) -> None:
        """Call all handlers; raises the first error at once, because then the run does not start."""
        for one in self._all:
            one.set_params(*args, **params)

    def opened(self, holder: Holder) -> None:
        """Call the handlers that have this method."""
        for one in self._all:
            getattr(one, "opened", lambda _: None)(holder)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the answer of the deciding handlers."""
        for one in self._all:
            if getattr(one, "decides", False):
                user_epoch = one.last_epoch(user_epoch=user_epoch)
        return user_epoch

    def write(self, epoch: int) -> None:
        """Call all handlers, then raise their errors together."""
        self._call_all(lambda one: one.write(epoch=epoch))

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Call all handlers, then raise their errors together."""
        self._call_all(lambda one: one.report(action, stats))

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True if all handlers return True."""
        return all(one.cp_accessible(epoch) for one in self._all)

    def _call_all(self, call: Callable[[MetadataHandler], None]) -> None:
        failures: list[Exception] = []
        for one in self._all:
            try:
                call(one)
            except Exception as error:
                failures.append(error)
        if failures[1:]:
            raise RelayError("; ".join(map(str, failures))) from failures[0]
        for failure in failures:
            raise failure


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
    """The node with the most own work and the median of the others; `dominates` if it is far slower."""

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
    from statistics import median  # only reports need it: a start of a run does not import it

    by_node: dict[str, list[NodeTimes]] = {}
    spent: dict[str, float] = {}
    for one in (one for times in actions for one in times):
        by_node.setdefault(one.node, []).append(one)
        spent |= {phase: spent.get(phase, 0.0) + secs for phase, secs in one.secs.items()}
    whole = sum(spent.values())
    shares = {phase: secs / whole if whole > 0 else 0.0 for phase, secs in spent.items()}
    rows = []
    for node, found in by_node.items():
        own = dict.fromkeys(phase for one in found for phase in one.secs)
        known = {phase: [one.secs.get(phase, 0.0) for one in found] for phase in own}
        phases = {phase: (median(secs), max(secs)) for phase, secs in known.items()}
        rows.append(NodeRow(node, len(found), median(map(own_secs, found)), phases))
    rows.sort(key=lambda row: -row.own_secs)
    verdict = None
    if len(rows) > 1:
        slowest, *others = rows
        typical = median(row.own_secs for row in others)
        excess = {
            phase: secs - median(row.phases.get(phase, (0.0, 0.0))[0] for row in others)
            for phase, (secs, _) in slowest.phases.items()
            if phase not in WAITING
        }
        last = Counter(max(times, key=own_secs).node for times in actions if times)
        verdict = StragglerVerdict(
            slowest.node,
            slowest.own_secs >= _RATIO * typical and slowest.own_secs - typical >= _EXCESS_SECS,
            slowest.own_secs,
            typical,
            last[slowest.node],
            len(actions),
            max(excess, key=lambda phase: excess[phase], default=""),
        )
    return StragglerSummary(len(actions), tuple(spent), tuple(rows), shares, verdict)


def own_secs(times: NodeTimes) -> float:
    """Return the seconds of a node's own work, without waiting."""
    return sum(secs for phase, secs in times.secs.items() if phase not in WAITING)
