"""Metadata handlers: a protocol by which an external store follows a job, and the default handler.

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
    """Holder of a checkpoint log: the job's `uuid`, which is fixed for the directory, and its `name`.

    `generation` counts launches; `branch` is the branch it writes, created by a rewind to epoch `base` (None:
    from scratch).
    """

    uuid: str
    name: str
    generation: int
    branch: int = 0
    base: int | None = None


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
        """

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the epoch to resume from, given the user's choice; None starts from scratch."""

    def write(self, epoch: int) -> None:
        """Record that `epoch` is committed; may be called again for the same epoch."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Record seconds by logical path for an action.

        Actions are `checkpoint_save`, `checkpoint_load` and `checkpoint_partial_load`.
        torchrelay passes a `NodeStats`, which also has phases, bytes and the slowest node.
        """

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True if a save may be attempted now; False skips it with a warning."""


EPOCH = "epoch"


@dataclass(frozen=True)
class HandlerEvent:
    """One call of a handler: `kind` is `epoch` or the action of a report; `time` is in Unix seconds.

    `prefix` is the location of the checkpoints, `nodes` the number of nodes of a saved epoch, `times` the
    durations of a report.
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
    """Read the events of one job from a `metadata.jsonl`; invalid lines are skipped.

    Returns at most the last `limit` events. Raises StorageError if it cannot be read.
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
        """Set the nodes, which are part of each epoch's line."""
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
        """Record the seconds of an action."""
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
        append_line(self.path, {"time": round(time.time(), 3), **self._holder, **line})


class SeveralHandlers:
    """Calls several handlers in order; only those with `decides = True` decide where a run resumes.

    Each of these receives the answer of the previous one as the user's choice, so the last one wins.
    """

    def __init__(self, handlers: Sequence[MetadataHandler]) -> None:
        self._all = tuple(handlers)

    @property
    def decides(self) -> bool:
        """True if one of the handlers decides."""
        return bool(self._deciding())

    def _deciding(self) -> list[MetadataHandler]:
        return [one for one in self._all if getattr(one, "decides", False)]

    def set_params(self, *args: Any, **params: Any) -> None:
        """Call all handlers; raises the first error at once, because then the run does not start."""
        for one in self._all:
            one.set_params(*args, **params)

    def opened(self, holder: Holder) -> None:
        """Call the handlers that have this method."""
        for one in self._all:
            opened = getattr(one, "opened", None)
            if opened is not None:
                opened(holder)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the answer of the deciding handlers."""
        for one in self._deciding():
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
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise RelayError("; ".join(map(str, failures))) from failures[0]
