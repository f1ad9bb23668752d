"""Readers: data in order, from a position that is saved with the epochs.

    with Node("trainer_0"):
        reader = ReaderWithLimit(DatasetReader("data"), num_iter=3)
        Task(step=lambda ws: [learn(batch) for batch in reader.batches(ws)])
        job.add_stop_condition(reader.data_finished())

Read positions live in workspaces, so each node has its own. One reader may be read by several threads.
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
from torchrelay.jobs.stop import Rule, StopAnswer
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass


class Reader(Protocol):
    """Anything that gives one batch after another."""

    def read(self, ws: Workspace) -> Any:
        """Return the next batch, or None when there is none left."""


class DatasetReader:
    """Batches of `batch_size` consecutive items of `data`; the last one may be shorter.

    `data` is the name of a blob of the reading node, or a sequence or tensor (sliced along its first
    axis). The position is the blob `<name>_cursor`. Made inside a Job, the reader adds a task to the
    init group that creates the position on the current node (else on every node), so it is saved with
    the epochs and reading goes on where it was. Otherwise the position begins with the first read of a
    run: in a PRIVATE run it vanishes with it. Raises UsageError for arguments that cannot be.
    """

    def __init__(self, data: Any, batch_size: int = 1, name: str | None = None) -> None:
        if not (isinstance(data, str) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))):
            raise UsageError(f"DatasetReader reads a blob's name, a sequence or a tensor, not {data!r}")
        self.data, self.batch_size = data, whole_number("batch_size", batch_size)
        self.name = name or (data if isinstance(data, str) else "reader")
        self.cursor = check_blob_name(f"{self.name}_cursor")
        self._lock = threading.Lock()
        self._declare_cursor()

    def __repr__(self) -> str:
        return f"DatasetReader({self.name!r})"

    def read(self, ws: Workspace) -> Any:
        """Return the next batch and move the position; None at the end. Threads share the position."""
        data = ws[self.data] if isinstance(self.data, str) else self.data
        with self._lock:
            if self.cursor not in ws:
                run_workspace(ws)[self.cursor] = 0
            begin = ws[self.cursor]
            end = min(begin + self.batch_size, len(data))
            if begin >= end:
                return None
            ws[self.cursor] = end
        return data[begin:end]

    def batches(self, ws: Workspace) -> Iterator[Any]:
        """Read to the end."""
        return _until_none(lambda: self.read(ws))

    def begin(self, ws: Workspace) -> None:
        """Make a position at 0 in `ws` where there is none; also a task's `task_init`."""
        with self._lock:
            ws.setdefault(self.cursor, 0)

    def _declare_cursor(self) -> None:
        from torchrelay.jobs.job import Job
        from torchrelay.jobs.task import Task

        job = Job.current(required=False)
        if job is None:
            return
        node, name = Node.current(required=False), f"begin_{self.cursor}"
        where = node.name if node else None
        if any((task.name, task.node) == (name, where) for task in job.init_group.tasks()):
            raise UsageError(
                f"there are two readers {self.name!r} on {where or 'every node'}: give name= to one"
            )
        Task(self._rewind, name=name, group=job.init_group)

    def _rewind(self, ws: Workspace) -> None:
        ws[self.cursor] = 0


@dataclass(eq=False)
class _Run:
    """What one run of a task has read: shared by its instances, with a lock of its own."""

    started: float
    explicit: bool = False
    reads: int = 0
    finished: bool = False
    over: bool = False
    loops: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReaderWithLimit:
    """At most `num_iter` batches, or `seconds` of reading, in each run of the task that reads.

    The limit is tested before a read, and the end of the data is found only by a read that comes back
    empty: a limit that is reached exactly at the end leaves `data_finished` false, and the next run is
    an empty one that sets it. `num_iter` None is no limit and 0 reads nothing; `seconds` None or 0 is no
    limit. `clock` gives seconds.

    Count, time and `data_finished` begin anew with each run: with the first read in a fresh PRIVATE
    workspace, which the instances of a task share. In GLOBAL workspaces each `batches` loop is a run;
    a GLOBAL task with several instances says where it begins by `Task(..., task_init=reader.begin)`, and
    so do tasks that read one reader in the same run of a group.
    """

    def __init__(
        self,
        reader: Reader,
        num_iter: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not callable(getattr(reader, "read", None)):
            raise UsageError(f"ReaderWithLimit reads from an object with read(ws), not from {reader!r}")
        self.reader = reader
        self.name = getattr(reader, "name", "reader")
        whole = isinstance(num_iter, int) and not isinstance(num_iter, bool)
        if num_iter is not None and not (whole and num_iter >= 0):
            raise UsageError(f"num_iter is an integer from 0, or None for no limit, not {num_iter!r}")
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"seconds is a number from 0, or None for no limit, not {seconds!r}")
        self.num_iter, self.seconds = num_iter, seconds
        self._clock = clock
        self._runs: WeakKeyDictionary[Workspace, _Run] = WeakKeyDictionary()
        self._last_of_node: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ReaderWithLimit({self.reader!r}, num_iter={self.num_iter}, seconds={self.seconds})"

    def begin(self, ws: Workspace) -> None:
        """Start a run in `ws` that all its children share; a task's `task_init`, where one is needed."""
        with self._lock:
            self._begin(ws, explicit=True)
        begin = getattr(self.reader, "begin", None)
        if begin is not None:
            begin(ws)

    def read(self, ws: Workspace) -> Any:
        """Return the next batch; None when the limit is reached or the data is at its end."""
        return self._read(ws, self._run_of(ws))

    def batches(self, ws: Workspace) -> Iterator[Any]:
        """Read until the limit or the end."""
        run = self._run_of(ws, new_loop=True)
        try:
            yield from _until_none(lambda: self._read(ws, run))
        finally:
            with self._lock:
                run.loops -= 1
                run.over = run.over or run.loops == 0

    def data_finished(self) -> DataFinished:
        """Return a stop condition: whether the last run on the node found the end of the data."""
        return DataFinished(self)

    def found_end(self, node: str) -> bool:
        """Whether any thread of the last run on `node` found the end of the data."""
        run = self._last_of_node.get(node)
        return run is not None and run.finished

    def _read(self, ws: Workspace, run: _Run) -> Any:
        if not self._admit(run):
            run.over = True
            return None
        batch = self.reader.read(ws)
        if batch is None:
            run.finished = run.over = True
        return batch

    def _admit(self, run: _Run) -> bool:
        """Test the limits and count the read that follows."""
        if self.seconds and self._clock() - run.started >= self.seconds:
            return False
        with run.lock:
            if self.num_iter is not None and run.reads >= self.num_iter:
                return False
            run.reads += 1
            return True

    def _run_of(self, ws: Workspace, *, new_loop: bool = False) -> _Run:
        """Find the run that `ws` belongs to, or begin it where no task_init did."""
        with self._lock:
            run = self._explicit_run(ws)
            if run is None:
                home = run_workspace(ws)
                run = self._runs.get(home)
                # a GLOBAL workspace outlives its runs
                if run is None or (home.parent is None and run.over and run.loops == 0):
                    run = self._begin(home)
            run.loops += new_loop
            return run

    def _explicit_run(self, ws: Workspace | None) -> _Run | None:
        while ws is not None:
            run = self._runs.get(ws)
            if run is not None and run.explicit:
                return run
            ws = ws.parent
        return None

    def _begin(self, ws: Workspace, *, explicit: bool = False) -> _Run:
        run = self._runs[ws] = self._last_of_node[ws.node] = _Run(self._clock(), explicit)
        return run


@dataclass(frozen=True)
class DataFinished:
    """Stop when a limited reader found the end of its data; nodes that do not read say nothing."""

    reader: ReaderWithLimit
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        """Named after the reader."""
        return f"data_finished({self.reader.name})"

    def ask(self, ctx: Any) -> StopAnswer:
        """Ask for the node of `ctx`."""
        if self.reader.found_end(ctx.workspace.node):
            return StopAnswer(True, f"{self.reader.name} is read to its end")
        return StopAnswer(False)


def run_workspace(ws: Workspace) -> Workspace:
    """Return the workspace of the run that `ws` is part of: the PRIVATE one right below the GLOBAL one.

    The instances of a PRIVATE task have children of it. A GLOBAL workspace is its own.
    """
    while ws.parent is not None and ws.parent.parent is not None:
        ws = ws.parent
    return ws


def _until_none(read: Callable[[], Any]) -> Iterator[Any]:
    while (batch := read()) is not None:
        yield batch
