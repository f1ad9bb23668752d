"""Work on a sequence, shared by a few threads that live only as long as the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
