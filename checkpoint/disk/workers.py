"""Work on a sequence, shared by a few threads that live only as long as the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
WRITERS = 3
"""Threads that write a file, however many processes do so: one copies and hashes while others wait for
the device; more gain nothing."""


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

    helpers = [threading.Thread(target=run, name=name, daemon=True) for _ in range(threads - 1)]
    try:
        _start(helpers)
        run()
    except BaseException as error:
        shared.stop()
        errors.append(error)
    errors.extend(_joined(helpers, shared))
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))


def beside(other: Callable[[], object], work: Callable[[], T], *, name: str = "torchrelay-hash") -> T:
    """What `work` returns, with `other` done meanwhile in another thread, or after it where there is none.

    Both have ended when it returns or raises what one of them raised, which keeps the other from being begun.
    """
    found: list[T] = []

    def both(todo: Iterator[Callable[[], object]]) -> None:
        for one in todo:
            one()

    share(both, (lambda: found.append(work()), other), 2, name=name)
    return found[0]


def _start(helpers: list[threading.Thread]) -> None:
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:  # no more threads in this process
            return


def _joined(helpers: list[threading.Thread], shared: _Shared[T]) -> list[BaseException]:
    """Wait for all of them, whatever happens meanwhile; returns what interrupted the waiting."""
    errors: list[BaseException] = []
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
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
