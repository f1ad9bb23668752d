"""A call that may hang, made by a thread so that its caller waits only so long. One at a time.

A driver that waits for a server that is frozen, a name that nobody resolves, a file on a share that is gone:
none of these has a time limit that always holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torchrelay.errors import StorageError

Result = TypeVar("Result")


class BoundedCalls:
    """Makes calls, each in a thread of its own that no exit of the process waits for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._running: _Call[object] | None = None

    def make(self, call: Callable[[], Result], wait_secs: float) -> Result:
        """The result of a call, or its error.

        Raises StorageError where it is not over in time, or where an earlier one is still going on: then
        nothing is called. A call that was given up goes on, and may succeed.
        """
        running = self._running
        if running is not None and running.thread.is_alive():
            raise StorageError(f"{self._what} has not answered for {time.monotonic() - running.began:.0f} s")
        mine = _Call(call)
        self._running = mine  # type: ignore[assignment]
        mine.thread.start()
        mine.thread.join(wait_secs)
        if mine.thread.is_alive():
            raise StorageError(f"{self._what} did not answer within {wait_secs:g} s")
        self._running = None
        return mine.outcome()


class _Call(Generic[Result]):
    def __init__(self, call: Callable[[], Result]) -> None:
        self.began = time.monotonic()
        self._call = call
        self._results: list[Result] = []
        self._error: BaseException = StorageError("the call is not over")
        self.thread = threading.Thread(target=self._run, name="metadata database", daemon=True)

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def outcome(self) -> Result:
        if self._results:
            return self._results[0]
        raise self._error
