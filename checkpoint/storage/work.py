"""Track calls in flight, progress of long operations, helper threads, and seconds by phase.

A thread inside a call that never returns cannot report it. Each call is therefore noted when it begins and
removed when it ends, so that the monitor of the process finds those that take too long. Operations state
their name and size; the storages' calls count the bytes (`call_in_flight`). Nothing here waits or decides.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from types import TracebackType
from typing import NamedTuple, TypeVar

from torchrelay.records import dataclass

PATIENCE_SECS = 60.0
"""Seconds that a call may take if it moves few bytes."""
LEAST_RATE = 16 << 20
"""Bytes per second: a call that moves more may take longer. A slower storage hangs."""
_PATIENT_VERBS = {"delete": 300.0}  # a large file's blocks are freed within the call


class StorageCall(NamedTuple):
    """One call: method, path, bytes that it moves, and start time (monotonic clock)."""

    verb: str
    path: str
    nbytes: int
    since: float

    def hangs(self, now: float) -> bool:
        """Whether it takes longer than it may."""
        allowed = _PATIENT_VERBS.get(self.verb, PATIENCE_SECS) + self.nbytes / LEAST_RATE
        return now - self.since > allowed


_MOVING_VERBS = {"read", "write"}

_calls: dict[int, tuple[str, str, int, float]] = {}
"""The fields of a `StorageCall`, by the object that notes it: quick, because calls are frequent."""
_moved: dict[int, int] = {}
"""By thread, so that no count is lost."""


class call_in_flight:  # noqa: N801 - it reads as the statement that it is; a generator would take twice the time
    """Note a call for the duration of the block; its bytes then count as moved."""

    __slots__ = ("_nbytes", "_path", "_verb")

    def __init__(self, verb: str, path: object, nbytes: int = 0) -> None:
        self._verb = verb
        self._path = str(path)
        self._nbytes = nbytes

    def __enter__(self) -> None:
        _calls[id(self)] = self._verb, self._path, self._nbytes, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _calls.pop(id(self), None)
        if error is not None:
            self._failed(error)
        elif self._verb in _MOVING_VERBS:
            moved(self._nbytes)

    def _failed(self, error: BaseException) -> None:
        """Add details to an error that ends the call."""

    def __del__(self) -> None:
        # Ctrl-C may come at the begin or end of the block: a call that stays noted would seem to hang for
        # ever.
        _calls.pop(id(self), None)


def moved(nbytes: int) -> None:
    """Count bytes that this thread has read or written in a storage."""
    if nbytes:
        thread = threading.get_ident()
        _moved[thread] = _moved.get(thread, 0) + nbytes


def moved_bytes() -> int:
    """Bytes that all threads of this process have moved in storages so far."""
    return sum(list(_moved.values()))


def calls() -> list[StorageCall]:
    """The calls of this process in flight, oldest first."""
    return [StorageCall(*one) for one in list(_calls.values())]


def hanging() -> str | None:
    """A message about a call that hangs, and for how long; None without one."""
    now = time.monotonic()
    for call in calls():
        if call.hangs(now):
            return (
                f"cannot {call.verb} {call.path}: the storage has not answered for {now - call.since:.0f} s"
            )
    return None


@dataclass(frozen=True)
class Work:
    """One operation: `nbytes` in all (None if unknown), of which `done` are moved, in `secs` so far."""

    what: str
    nbytes: int | None
    done: int
    secs: float

    @property
    def secs_left(self) -> float | None:
        """Estimate at the rate so far; None without a rate."""
        if not self.nbytes or not self.done or self.secs <= 0:
            return None
        return max(self.nbytes - self.done, 0) * self.secs / self.done


_numbers = itertools.count()
_works: dict[int, tuple[str, int | None, int, float]] = {}
_advanced: dict[int, int] = {}
"""Bytes that operations have reported themselves, by number."""


@contextmanager
def progress(what: str, nbytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Note the block as a long operation; it gets a function to report bytes that no storage moves."""
    number = next(_numbers)
    _works[number] = (what, nbytes, moved_bytes(), time.monotonic())

    def advance(more: int) -> None:
        _advanced[number] = _advanced.get(number, 0) + more

    try:
        yield advance
    finally:
        del _works[number]
        _advanced.pop(number, None)


def works() -> list[Work]:
    """The long operations in flight, oldest first. Bytes moved during two of them count for both."""
    moved, now = moved_bytes(), time.monotonic()
    found = []
    for number, (what, nbytes, before, since) in list(_works.items()):
        done = moved - before + _advanced.get(number, 0)
        found.append(Work(what, nbytes, done if nbytes is None else min(done, nbytes), now - since))
    return found


T = TypeVar("T")
WRITERS = 3
"""Threads that write a file: one copies and hashes while others wait for the device."""
LOOK_SECS = 5.0
"""Seconds after which a thread that waits for a helper checks it, even without its signal."""


def share(
    work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int, *, name: str = "torchrelay-write"
) -> None:
    """Call `work` in this thread and in `threads - 1` others; together they get each item once, in order.

    All have ended when it returns. The first error ends them after their current item, and is raised; an
    interrupt takes precedence. Works with fewer threads too.
    """
    shared, errors = _Shared(items), list[BaseException]()

    def run() -> None:
        try:
            work(shared)
        except BaseException as error:
            shared.stop()
            errors.append(error)

    helpers = [_Helper(run, name) for _ in range(threads - 1)]
    try:
        _start(helpers)
        run()
    except BaseException as error:
        shared.stop()
        errors.append(error)
    errors.extend(_ended(helpers, shared))
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))


def beside(
    work: Callable[[], T], others: Iterable[Callable[[], object]], helpers: int = 1, *, name: str
) -> T:
    """Return the result of `work`, done by this thread; others do `others` meanwhile, and this one the rest.

    All have ended when it returns or raises. An error of `work` ends the others after their current item.
    """
    caller, found = threading.get_ident(), list[T]()

    def run(todo: Iterator[Callable[[], object]]) -> None:
        if threading.get_ident() == caller:
            found.append(work())
        for one in todo:
            one()

    share(run, others, 1 + helpers, name=name)
    return found[0]


class _Helper(threading.Thread):
    """A thread that signals its end: an interrupted `join` may mark a live one as ended (bpo-45274)."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.over.set()


def _start(helpers: list[_Helper]) -> None:
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:  # this process has no more threads
            return


def _ended(helpers: list[_Helper], shared: _Shared[T]) -> list[BaseException]:
    """Wait for all that began, in spite of interrupts; returns these.

    A helper without a number has not begun; if it begins later, the sequence has been stopped or has ended.
    """
    errors: list[BaseException] = []
    for helper in helpers:
        while helper.ident is not None and not helper.over.is_set():
            try:
                helper.over.wait(LOOK_SECS)
            except BaseException as error:
                shared.stop()
                errors.append(error)
    return errors


class _Shared(Iterator[T]):
    """An iterator for several threads."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False

    def __next__(self) -> T:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        self._stopped = True


BASE_PATIENCE_SECS = 600.0


SLOWEST_BYTES_PER_SEC = 10e6
"""A rank that writes more slowly than this, plus the base, is late."""


@dataclass
class Clock:
    """Seconds by phase: of this process, of one thread, or averaged over the threads of a write.

    Their sum therefore never exceeds the elapsed time.
    """

    secs: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.secs[phase] = self.secs.get(phase, 0.0) + time.monotonic() - start

    def add_mean(self, parts: Sequence[Clock], threads: int) -> None:
        """Add the average over `threads` threads of any number of parts."""
        for phase in {phase: None for part in parts for phase in part.secs}:
            total = sum(part.secs.get(phase, 0.0) for part in parts)
            self.secs[phase] = self.secs.get(phase, 0.0) + total / threads


def patience_secs(nbytes: int) -> float:
    """Seconds to wait for a rank that writes or reads so many bytes from a very slow disk."""
    return BASE_PATIENCE_SECS + nbytes / SLOWEST_BYTES_PER_SEC
