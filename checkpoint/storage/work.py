"""Work in progress: calls in flight, how far long works are, their threads, the time of phases.

A thread inside a call that never returns cannot tell. Each call is noted where it begins and forgotten where
it ends; who watches the process asks for those that take longer than any storage that still moves.

Works say what they do and how many bytes they are going to move; the storages' calls say what was moved
(`underway`). Nobody waits here, and nothing is decided by it.
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
"""How long a call may take that moves no bytes to speak of."""
LEAST_RATE = 16 << 20
"""Bytes per second by which a call that moves many may take longer: a storage that is slower hangs."""
_PATIENT_VERBS = {"delete": 300.0}  # a large file's blocks are freed within the call


class StorageCall(NamedTuple):
    """One call: what it does to which path, how many bytes it moves, and since when (monotonic clock)."""

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
"""What a `StorageCall` has, by the object that notes it: made quickly, for storages are called very often."""
_moved: dict[int, int] = {}
"""By thread, so that no count is lost."""


class underway:  # noqa: N801 - it reads as the statement that it is; a generator would take twice the time
    """Note a call for as long as the block takes; what is written or read then counts as moved."""

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
        """Say more of an error that ends the call."""

    def __del__(self) -> None:
        # Ctrl-C may come where the block begins or ends: what is not forgotten seems to hang for ever.
        _calls.pop(id(self), None)


def moved(nbytes: int) -> None:
    """Count bytes that this thread has read or written in a storage."""
    if nbytes:
        thread = threading.get_ident()
        _moved[thread] = _moved.get(thread, 0) + nbytes


def moved_bytes() -> int:
    """What all threads of this process have moved in storages since it began."""
    return sum(list(_moved.values()))


def calls() -> list[StorageCall]:
    """The calls of this process that are going on, the oldest first."""
    return [StorageCall(*one) for one in list(_calls.values())]


def hanging() -> str | None:
    """Say which call hangs, for how long; None when none does."""
    now = time.monotonic()
    for call in calls():
        if call.hangs(now):
            return (
                f"cannot {call.verb} {call.path}: the storage has not answered for {now - call.since:.0f} s"
            )
    return None


@dataclass(frozen=True)
class Work:
    """One work: `nbytes` in all (None: not known), of which `done` are moved, in `secs` until now."""

    what: str
    nbytes: int | None
    done: int
    secs: float

    @property
    def secs_left(self) -> float | None:
        """At the rate until now; None while nothing tells."""
        if not self.nbytes or not self.done or self.secs <= 0:
            return None
        return max(self.nbytes - self.done, 0) * self.secs / self.done


_numbers = itertools.count()
_works: dict[int, tuple[str, int | None, int, float]] = {}


@contextmanager
def headway(what: str, nbytes: int | None = None) -> Iterator[None]:
    """Say that the block is such a work."""
    number = next(_numbers)
    _works[number] = (what, nbytes, moved_bytes(), time.monotonic())
    try:
        yield
    finally:
        del _works[number]


def works() -> list[Work]:
    """The works that are going on, the oldest first. What two at once move is counted for both."""
    moved, now = moved_bytes(), time.monotonic()
    found = []
    for what, nbytes, before, since in list(_works.values()):
        done = moved - before
        found.append(Work(what, nbytes, done if nbytes is None else min(done, nbytes), now - since))
    return found


T = TypeVar("T")
WRITERS = 3
"""Threads that write a file, however many processes do so: one copies and hashes while others wait for
the device; more gain nothing."""
LOOK_SECS = 5.0
"""How often whoever waits for a helper looks at it, whatever became of the signal."""


def share(
    work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int, *, name: str = "torchrelay-write"
) -> None:
    """Call `work` in this thread and in `threads - 1` others; together they get each item once, in order.

    All have ended when it returns. The first error ends them after the item that each is at, and is
    raised; an interrupt goes before other errors. With fewer threads than asked for it takes longer.
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
    """What `work` returns, done by this thread; others do `others` meanwhile, and this one what is left.

    All have ended when it returns or raises. What `work` raises ends the others after the one that each
    thread is at.
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
    """A thread that tells when its work has ended.

    `Thread.join` does not do for that: where it is interrupted, Python up to 3.12 may take a living thread
    for one that has ended (bpo-45274).
    """

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
        except RuntimeError:  # no more threads in this process
            return


def _ended(helpers: list[_Helper], shared: _Shared[T]) -> list[BaseException]:
    """Wait for all that began, whatever happens meanwhile; returns what interrupted the waiting.

    A helper without a number has not begun: if it still does, an interrupt has stopped the sequence, or this
    thread has come to its end.
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
    """An iterator that several threads may ask."""

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
        """No more items for anybody."""
        self._stopped = True


BASE_PATIENCE_SECS = 600.0


SLOWEST_BYTES_PER_SEC = 10e6
"""A rank that writes slower than this on top of the base is late."""


@dataclass
class Clock:
    """Seconds by phase: of this process, of one thread, or on average over the threads of a write.

    So they never add up to more than the time that passed.
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
        """Add what `threads` threads have counted in any number of parts."""
        for phase in {phase: None for part in parts for phase in part.secs}:
            total = sum(part.secs.get(phase, 0.0) for part in parts)
            self.secs[phase] = self.secs.get(phase, 0.0) + total / threads


def patience_secs(nbytes: int) -> float:
    """How long the others wait for a rank that writes or reads so much from a very slow disk."""
    return BASE_PATIENCE_SECS + nbytes / SLOWEST_BYTES_PER_SEC
