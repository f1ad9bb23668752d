"""Deleting behind the training: what the log has given up goes in a thread of its own, in order.

Unlinking takes longer the more a file holds. Who asks does not wait; who needs the space, and who lets go
of the log, does. A process that dies in between leaves files that the log lists as retired or does not
know, and the next writer's sweep finds them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torchrelay.jobs import runtime

IDLE_SECS = 60.0
"""How long the thread waits for more to do before it ends."""
PATIENCE_SECS = 300.0
"""How long is waited for deletions at most: less than the other processes wait for this one."""


class Deletions:
    """Works off what was asked for, one after the other; keeps failures until somebody takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[tuple[str, Callable[[], object]]] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._failed: list[str] = []

    def ask(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` in the thread; where it raises, `what` and the reason are kept as a failure."""
        with self._changed:
            self._asked.append((what, work))
            self._changed.notify_all()
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="torchrelay deletions", daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError:  # no more threads in this process
                self._thread = None
        self._work_off()

    def wait(self, patience_secs: float = PATIENCE_SECS) -> bool:
        """Return when all that was asked for is done; False if that takes longer."""
        with runtime.waiting(), self._changed:
            return self._changed.wait_for(lambda: not self._asked and not self._busy, patience_secs)

    def take_failures(self) -> list[str]:
        """What could not be done since the last time, for people."""
        with self._changed:
            taken, self._failed = self._failed, []
        return taken

    def _run(self) -> None:
        while True:
            runtime.behind()
            self._work_off()
            with self._changed:
                if not self._changed.wait_for(lambda: self._asked, IDLE_SECS):
                    self._thread = None
                    return

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._busy = bool(self._asked)
                if not self._asked:
                    self._changed.notify_all()
                    return
                what, work = self._asked.popleft()
            try:
                work()
            except Exception as error:
                with self._changed:
                    self._failed.append(f"{what}: {error}")
