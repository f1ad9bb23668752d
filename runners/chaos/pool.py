"""Trials side by side: each worker has a nursery, a plan and a directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torchrelay.runners.chaos.forks import Nursery
from torchrelay.runners.chaos.plan import PlanFile

T = TypeVar("T")
R = TypeVar("R")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it


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
    """A directory for trials that goes with them: in memory where that can be, unless told where."""
    if parent is None and _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
        parent = _MEMORY
    made = Path(tempfile.mkdtemp(prefix="torchrelay-chaos-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
