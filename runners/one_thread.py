"""Calls made in one thread of their own, so that whoever waits for them can give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class LateError(Exception):
    """A call was not over in time; it goes on."""


class OneThread:
    """Makes calls one after the other, always in the same thread, which no exit of the process waits for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: _Call | None = None

    def failure(self, call: Callable[[], object], wait_secs: float) -> BaseException | None:
        """What a call raised, None if it was well; LateError if it, or one before, is not over in time."""
        if self._late is not None and not self._late.over.is_set():
            return LateError("an earlier call is not over")
        if self._thread is None:
            self._calls = SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            self._thread.start()
        mine = _Call(call)
        self._calls.put(mine)
        if mine.over.wait(wait_secs):
            return mine.error
        self._late = mine
        return LateError(f"it was not over after {wait_secs:g} s")

    def end(self) -> None:
        """End the thread when the last call is over; a later one has another thread."""
        self._calls.put(None)
        self._thread = None


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()


class _Call:
    def __init__(self, call: Callable[[], object]) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._call = call

    def make(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error
        self.over.set()
