"""Metadata handlers: the five methods by which an outside store follows a job, and the default one.

A handler remembers epochs and durations wherever it likes and may override the resume decision.
It is called on rank 0's main thread only. An exception in `write` or `report` degrades the run
to a warning; one in `set_params` or `last_epoch` ends it, because the decision would be a guess.

Two more things a handler may have, and need not:

    decides            whether its `last_epoch` decides where a run starts. Without it a manager's handler
                       does, as in Caffe2, and one that was given beside a run directory does not
    opened(holder)     hears, before `write` and `report`, as whom the job holds its checkpoint log

The lines of `metadata.jsonl` are read back as notes, so that an index that lost some can be made again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchrelay.errors import RelayError
from torchrelay.metadata.fs import SamePlace, append_line, read_lines
from torchrelay.metadata.statistics import NodeStats, NodeTimes, is_count, is_text, seconds_in, times_of
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Holder:
    """Who holds a checkpoint log: job `uuid` (of this directory, for ever) called `name`, for a while.

    `generation` counts the starts; `branch` is what it writes, begun by a rewind to epoch `base` (None: begun
    from scratch).
    """

    uuid: str
    name: str
    generation: int
    branch: int = 0
    base: int | None = None


@runtime_checkable
class MetadataHandler(Protocol):
    """What a job tells, and asks, a store of the user's choice."""

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Where this job keeps its checkpoints; called before anything else, once per train."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from, given the user's wish; None starts from scratch."""

    def write(self, epoch: int) -> None:
        """`epoch` is acknowledged on all nodes. May be called again for the same epoch."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Seconds by logical path for `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.

        torchrelay passes a `metadata.stats.NodeStats`, which also has phases, bytes and the slowest node.
        """

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether a save may be tried now; False skips this one with a warning."""


EPOCH = "epoch"


@dataclass(frozen=True)
class HandlerEvent:
    """One call of a handler: `kind` is `epoch` or the action of a report; `time` is in Unix seconds.

    `prefix` is where the checkpoints of the job are; `nodes` is the number of nodes of a saved epoch; `times`
    belong to a report.
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
        """What tells it from the others of its job."""
        return (self.holder.generation, self.epoch, self.kind)


def report_notes(
    holder: Holder, prefix: str, action: str, nodes: Sequence[NodeTimes], time: float
) -> list[HandlerEvent]:
    """The notes of a report: one, or none where the paths name no epoch."""
    epochs = {one.epoch for one in nodes}
    if len(epochs) != 1 or (epoch := epochs.pop()) is None:
        return []
    return [HandlerEvent(holder, prefix, action, epoch, time, len(nodes), tuple(nodes))]


def notes_of_file(path: Path, job: Holder, prefix: str, limit: int | None = None) -> list[HandlerEvent]:
    """The notes of a `metadata.jsonl` on one job, by its id; what is no note is left out.

    Of more than `limit` notes those that were written last. StorageError where it cannot be read.
    """
    found: list[HandlerEvent] = []
    for line in read_lines(path):
        found += _notes_of(line, job, prefix)
        if limit is not None and len(found) > 2 * limit:
            del found[:-limit]
    return found if limit is None else found[-limit:]


def _notes_of(line: Mapping[str, Any], job: Holder, prefix: str) -> Iterator[HandlerEvent]:
    holder, time = _holder_of(line, job), seconds_in(line.get("time"))
    kind, nodes = line.get("kind"), line.get("nodes")
    if holder is None or time is None or not (is_text(kind) and isinstance(nodes, list)):
        return
    if kind != EPOCH:
        yield from report_notes(holder, prefix, str(kind), times_of(nodes), time)
    elif is_count(epoch := line.get("epoch")):
        yield HandlerEvent(holder, prefix, EPOCH, int(epoch or 0), time, len(nodes))


def _holder_of(line: Mapping[str, Any], job: Holder) -> Holder | None:
    generation, branch, base = line.get("generation"), line.get("branch"), line.get("base")
    if line.get("job") != job.uuid or not (is_count(generation) and is_count(branch)):
        return None
    if base is not None and not is_count(base):
        return None
    return replace(job, generation=int(generation or 0), branch=int(branch or 0), base=base)


FILE_NAME = "metadata.jsonl"


class FileMetadataHandler:
    """Writes what it is told as JSON lines; it does not decide where a run resumes."""

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
        """Remember the nodes, so that each epoch's line says who took part."""
        self._nodes = list(node_names)

    def opened(self, holder: Holder) -> None:
        """From now on each line says whose it is; indexes are made again from that."""
        known = ("generation", "branch", "base")  # the job's name stands in `run.json`
        self._holder = {"job": holder.uuid, **{name: getattr(holder, name) for name in known}}

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Give the user's wish back: the log decides, not this file."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Note that an epoch was acknowledged; readers take the last line of an epoch."""
        self._append({"kind": "epoch", "epoch": epoch, "nodes": self._nodes})

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Note the seconds of an action."""
        details = stats.to_json() if isinstance(stats, NodeStats) else {}
        self._append({"kind": action, "secs": dict(stats), **details})

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory can be written now."""
        return os.access(self.path.parent, os.W_OK | os.X_OK)

    def epochs(self) -> list[int]:
        """The epochs noted so far, in order, without repetitions."""
        lines = [line for line in read_lines(self.path) if line.get("kind") == "epoch"]
        return sorted({line["epoch"] for line in lines if type(line.get("epoch")) is int})

    def _append(self, line: dict[str, Any]) -> None:
        self._place.check()
        append_line(self.path, {"time": round(time.time(), 3), **self._holder, **line})


class SeveralHandlers:
    """Tells all in their order. Only those that say `decides = True` are asked where a run starts.

    The last of these has the last word: each is given the answer of the one before as the user's wish.
    """

    def __init__(self, handlers: Sequence[MetadataHandler]) -> None:
        self._all = tuple(handlers)

    @property
    def decides(self) -> bool:
        """Whether one of them does."""
        return bool(self._deciding())

    def _deciding(self) -> list[MetadataHandler]:
        return [one for one in self._all if getattr(one, "decides", False)]

    def set_params(self, *args: Any, **params: Any) -> None:
        """Tell all; the first failure is raised at once, because the run does not start then."""
        for one in self._all:
            one.set_params(*args, **params)

    def opened(self, holder: Holder) -> None:
        """Tell those that want to hear it."""
        for one in self._all:
            opened = getattr(one, "opened", None)
            if opened is not None:
                opened(holder)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """What those that decide make of the user's wish."""
        for one in self._deciding():
            user_epoch = one.last_epoch(user_epoch=user_epoch)
        return user_epoch

    def write(self, epoch: int) -> None:
        """Tell all; failures are raised together when all have been told."""
        self._tell(lambda one: one.write(epoch=epoch))

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Tell all; failures are raised together when all have been told."""
        self._tell(lambda one: one.report(action, stats))

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether all agree; nobody is asked after the first who does not."""
        return all(one.cp_accessible(epoch) for one in self._all)

    def _tell(self, call: Callable[[MetadataHandler], None]) -> None:
        failures: list[Exception] = []
        for one in self._all:
            try:
                call(one)
            except Exception as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise RelayError("; ".join(map(str, failures))) from failures[0]
