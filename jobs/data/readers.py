"""Readers: data in order, with a position that is saved with the epochs.

    with Node("trainer_0"):
        reader = ReaderWithLimit(DatasetReader("data"), num_iter=3)
        Task(step=lambda ws: [learn(batch) for batch in reader.batches(ws)])
        job.add_stop_condition(reader.data_finished())

Positions are stored in workspaces, so each node has its own. Several threads may share a reader.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import Node, check_blob_name
from torchrelay.jobs.runtime import whole_number
from torchrelay.jobs.stop import AskedValue, StopCondition
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass


class Reader(Protocol):
    """Protocol of objects that return one batch after another."""

    def read(self, ws: Workspace) -> Any:
        """Return the next batch, or None at the end."""


class DatasetReader:
    """Reader of batches of `batch_size` consecutive items; the last one may be shorter.

    The position is the blob `<name>_cursor`. Inside a Job, the reader adds a task to the init group that
    creates it on the current node (else on every node), so it is saved with the epochs and restored on
    resume. A resumed epoch that lacks it starts at 0, and a warning says that the position is not saved.
    Outside of a Job it is created by the first read of a run, and discarded with a PRIVATE run.

    Args:
        data: Name of a blob of the reading node, or a sequence or tensor (sliced along its first axis).
        batch_size: Items per batch, at least 1.
        name: Name of the reader, unique per node.

    Raises:
        UsageError: An argument is invalid.

    Example:
        reader = DatasetReader("data", batch_size=32)
    """

    def __init__(self, data: Any, batch_size: int = 1, name: str | None = None) -> None:
        if not (isinstance(data, str) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))):
            raise UsageError(
                f"invalid data of DatasetReader: expected a blob's name, a sequence or a tensor, not {data!r}"
            )
        self.data, self.batch_size = data, whole_number("batch_size", batch_size)
        self.name = name or (data if isinstance(data, str) else "reader")
        self.cursor = check_blob_name(f"{self.name}_cursor")
        self._lock = threading.Lock()
        from torchrelay.jobs.job import Job
        from torchrelay.jobs.task import Task

        job = Job.current(required=False)
        self._outlives_runs = job is not None
        if job is None:
            return
        node, begin = Node.current(required=False), f"begin_{self.cursor}"
        where = node.name if node else None
        if any((task.name, task.node) == (begin, where) for task in job.init_group.tasks()):
            raise UsageError(
                f"two readers are called {self.name!r} on {where or 'every node'}: give one another name="
            )
        Task(self._rewind, name=begin, group=job.init_group)

    def __repr__(self) -> str:
        return f"DatasetReader({self.name!r})"

    def read(self, ws: Workspace) -> Any:
        """Return the next batch and advance the position, which threads share; None at the end."""
        data = ws[self.data] if isinstance(self.data, str) else self.data
        with self._lock:
            self._create(run_workspace(ws))
            begin = ws[self.cursor]
            end = min(begin + self.batch_size, len(data))
            if begin >= end:
                return None
            ws[self.cursor] = end
        return data[begin:end]

    def batches(self, ws: Workspace) -> Iterator[Any]:
        """Yield batches up to the end."""
        return _until_none(lambda: self.read(ws))

    def begin(self, ws: Workspace) -> None:
        """Create the position 0 in `ws` if there is none; usable as a task's `task_init`."""
        with self._lock:
            self._create(ws)

    def _create(self, ws: Workspace) -> None:
        if self.cursor in ws:
            return
        while self._outlives_runs and ws.parent is not None:
            ws = ws.parent
        self._rewind(ws)

    def _rewind(self, ws: Workspace) -> None:
        ws[self.cursor] = 0


@dataclass(eq=False)
class _Run:
    """Reading state of one run of a task, shared by its instances, with its own lock."""

    started: float
    explicit: bool = False
    reads: int = 0
    finished: bool = False
    over: bool = False
    loops: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReaderWithLimit:
    """Reader with a limit on batches or time in each run of the reading task.

    The limit is checked before a read, and the end of the data is detected by an empty read. So if the limit
    is reached exactly at the end, `data_finished` stays false until the next run, which is empty.

    Count, time and `data_finished` are reset at each run. A run begins with the first read in a new PRIVATE
    workspace, which the instances of a task share. In GLOBAL workspaces each `batches` loop is a run. A
    GLOBAL task with several instances, and several tasks that share a reader in one run of a group, must
    mark the beginning with `Task(..., task_init=reader.begin)`.

    Args:
        reader: The reader to limit.
        num_iter: Batches per run; None means no limit.
        seconds: Reading time per run; None or 0 means no limit.
        clock: Function that returns seconds.

    Raises:
        UsageError: An argument is invalid.

    Example:
        reader = ReaderWithLimit(DatasetReader("data"), num_iter=3)
    """

    def __init__(
        self,
        reader: Reader,
        num_iter: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not callable(getattr(reader, "read", None)):
            raise UsageError(
                f"invalid reader of ReaderWithLimit: expected an object with read(ws), not {reader!r}"
            )
        self.reader = reader
        self.name = getattr(reader, "name", "reader")
        whole = isinstance(num_iter, int) and not isinstance(num_iter, bool)
        if num_iter is not None and not (whole and num_iter >= 0):
            raise UsageError(f"invalid num_iter: expected an integer >= 0 or None, not {num_iter!r}")
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"invalid seconds: expected a number >= 0 or None, not {seconds!r}")
        self.num_iter, self.seconds = num_iter, seconds
        self._clock = clock
        self._runs: WeakKeyDictionary[Workspace, _Run] = WeakKeyDictionary()
        self._last_of_node: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ReaderWithLimit({self.reader!r}, num_iter={self.num_iter}, seconds={self.seconds})"

    def begin(self, ws: Workspace) -> None:
        """Begin a run in `ws`, shared by its children; usable as a task's `task_init`."""
        with self._lock:
            self._begin(ws, explicit=True)
        begin = getattr(self.reader, "begin", None)
        if begin is not None:
            begin(ws)

    def read(self, ws: Workspace) -> Any:
        """Return the next batch; None at the limit or the end of the data."""
        return self._read(ws, self._run_of(ws))

    def batches(self, ws: Workspace) -> Iterator[Any]:
        """Yield batches up to the limit or the end."""
        run = self._run_of(ws, new_loop=True)
        try:
            yield from _until_none(lambda: self._read(ws, run))
        finally:
            with self._lock:
                run.loops -= 1
                run.over = run.over or run.loops == 0

    def data_finished(self) -> StopCondition:
        """Return a stop condition that is true if the last run on the node found the end of the data."""
        reason = f"{self.name} has reached its end"
        return AskedValue(
            f"data_finished({self.name})", lambda ctx: self.found_end(ctx.workspace.node), reason
        )

    def found_end(self, node: str) -> bool:
        """Return True if any thread of the last run on `node` found the end of the data."""
        run = self._last_of_node.get(node)
        return run is not None and run.finished

    def _read(self, ws: Workspace, run: _Run) -> Any:
        late = self.seconds and self._clock() - run.started >= self.seconds
        with run.lock:
            if late or (self.num_iter is not None and run.reads >= self.num_iter):
                run.over = True
                return None
            run.reads += 1
        batch = self.reader.read(ws)
        if batch is None:
            run.finished = run.over = True
        return batch

    def _run_of(self, ws: Workspace, *, new_loop: bool = False) -> _Run:
        """Return the run of `ws`, beginning it if no task_init did."""
        with self._lock:
            around = [ws]
            while around[-1].parent is not None:
                around.append(around[-1].parent)
            runs = (self._runs.get(one) for one in around)
            run = next((one for one in runs if one is not None and one.explicit), None)
            if run is None:
                home = run_workspace(ws)
                run = self._runs.get(home)
                # a GLOBAL workspace outlives its runs
                if run is None or (home.parent is None and run.over and run.loops == 0):
                    run = self._begin(home)
            run.loops += new_loop
            return run

    def _begin(self, ws: Workspace, *, explicit: bool = False) -> _Run:
        run = self._runs[ws] = self._last_of_node[ws.node] = _Run(self._clock(), explicit)
        return run


def run_workspace(ws: Workspace) -> Workspace:
    """Return the workspace of the run that contains `ws`: the one directly below the GLOBAL one, if any."""
    while ws.parent is not None and ws.parent.parent is not None:
        ws = ws.parent
    return ws


def _until_none(read: Callable[[], Any]) -> Iterator[Any]:
    while (batch := read()) is not None:
        yield batch
