"""Trials as processes: children of nurseries, workers side by side, and stopped ones that stand still."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torchrelay
from torchrelay.chaos.faults import PlanFile, library
from torchrelay.errors import StorageError
from torchrelay.records import dataclass

KILLED = -9


@dataclass(frozen=True)
class Order:
    """A function to call in a fresh process, and the plan that it is struck by.

    `function` is `package.module:name` or `/a/file.py:name`; what it returns must be JSON.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plan: Path | None = None
    limit_secs: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    ahead: Sequence[str] = ()
    """Functions that the nursery itself looks up before it forks, because finding them takes long."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` as of a shell's wait, -9 for a kill; `late` where the limit ended it."""

    code: int
    late: bool = False
    value: Any = None
    raised: str = ""
    text: str = ""
    trace: str = ""
    modules: Sequence[str] = ()

    @property
    def well(self) -> bool:
        """Whether the function returned."""
        return self.code == 0 and not self.late and not self.raised

    @property
    def killed(self) -> bool:
        """Whether a fault killed it."""
        return self.code == KILLED and not self.late

    @property
    def reason(self) -> str:
        """Why it did not return, in a line."""
        if self.late:
            return "it did not end in time"
        return f"{self.raised}: {self.text}" if self.raised else f"it ended with {self.code}"


class Nursery:
    """A process that forks children; one at a time."""

    def __init__(self, log: Path | None = None) -> None:
        where = str(Path(torchrelay.__file__).parent.parent)
        paths = [where, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        self._log = open(log, "ab") if log else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchrelay.chaos.child.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
        )  # fmt: skip

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warm(self, order: Order) -> Ended:
        """Carry an order out, and import its modules here too: later children start with them."""
        first = self._run(order, tell_modules=True)
        if not first.well:
            return first
        return self._run(order, modules=list(first.modules))

    def run(self, order: Order) -> Ended:
        """Carry an order out and wait for its end."""
        return self._run(order)

    def begin(self, order: Order, **more: Any) -> int:
        """Start a child; returns its pid. `end` must follow."""
        self._send(order, more)
        told = self._told()
        if "started" not in told:
            raise StorageError(f"the child of a trial did not start: {told.get('text') or told}")
        return int(told["started"])

    def end(self) -> Ended:
        """Wait for the child that was begun."""
        told = self._told()
        told["modules"] = told.get("modules") or ()
        return Ended(**told)

    def close(self) -> None:
        """End the nursery, and the child it may have."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _run(self, order: Order, **more: Any) -> Ended:
        self.begin(order, **more)
        return self.end()

    def _send(self, order: Order, more: Mapping[str, Any]) -> None:
        line = {
            "function": order.function, "arguments": dict(order.arguments), "limit": order.limit_secs,
            "plan": str(order.plan) if order.plan else None, "environment": dict(order.environment),
            "ahead": list(order.ahead), **more,
        }  # fmt: skip
        if self._process.stdin is None:
            raise StorageError("the nursery takes no orders")
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _told(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise StorageError(f"the nursery of the trials ended with {self._process.wait(10)}")
        found = json.loads(line)
        return found if isinstance(found, dict) else {}


_POLL_SECS = 0.001


def await_stillness(pid: int, limit_secs: float) -> None:
    """Wait until no thread of a stopped process runs any more, at most so long.

    A stop reaches a thread that is in a system call when that ends. An asynchronous save may be in the
    middle of a write or a sync. A copy of the device in that moment would match no power cut.
    """
    until = time.monotonic() + limit_secs
    while time.monotonic() < until and _moves(pid):
        time.sleep(_POLL_SECS)


def members(group: int) -> Iterator[int]:
    """The processes of a group."""
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(entry)) == group:
                yield int(entry)


def _moves(pid: int) -> bool:
    """Whether a thread of a process is neither stopped nor gone."""
    with suppress(OSError):
        return any(
            status.read_text().rpartition(")")[2].split()[0] not in "TtZX"
            for status in Path(f"/proc/{pid}/task").glob("*/stat")
        )
    return False


T = TypeVar("T")
R = TypeVar("R")
_MEMORY = Path("/dev/shm")


class Worker:
    """One nursery and what its trials need."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.nursery = Nursery(directory / "nursery.log")
        self.plan = PlanFile(directory / "plan")
        self.warm = False
        """Whether the nursery has imported what its trials need."""
        self._made = 0

    def fresh(self) -> Path:
        """A name below this worker's directory that was not used before."""
        self._made += 1
        return self.directory / f"run{self._made}"

    def close(self) -> None:
        """End the nursery."""
        self.nursery.close()
        self.plan.close()


class Pool:
    """Some workers, made when they are first needed."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self.directory = directory
        self._size = max(1, workers)
        self._mine = threading.local()
        self._made: list[Worker] = []
        self._lock = threading.Lock()

    @property
    def worker(self) -> Worker:
        """The worker of the calling thread."""
        found: Worker | None = getattr(self._mine, "worker", None)
        if found is None:
            with self._lock:
                number = len(self._made)
                self._made.append(Worker(self.directory / f"worker{number}"))
                found = self._mine.worker = self._made[-1]
        return found

    def map(self, work: Callable[[Worker, T], R], items: Iterable[T]) -> list[R]:
        """`work` of every item by some worker; results in the order of the items."""
        if self._size == 1:
            return [work(self.worker, item) for item in items]
        return list(self._executor.map(lambda item: work(self.worker, item), items))

    @property
    def _executor(self) -> ThreadPoolExecutor:
        found: ThreadPoolExecutor | None = self.__dict__.get("executor")
        if found is None:
            found = self.__dict__["executor"] = ThreadPoolExecutor(self._size, "torchrelay chaos")
        return found

    def close(self) -> None:
        """End all workers."""
        if "executor" in self.__dict__:
            self._executor.shutdown(cancel_futures=True)
        for worker in self._made:
            worker.close()


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """A temporary directory for trials: in `parent`, else in memory if possible."""
    if parent is None and _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
        parent = _MEMORY
    made = Path(tempfile.mkdtemp(prefix="torchrelay-chaos-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
