"""A thread that stands by for saves, so that none is started while the training waits.

Who starts a thread waits until it runs. On cores that compute that takes milliseconds, of a boundary that
takes five; to hand work to a thread that waits for it takes microseconds.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

SAVES, STANDS_BY = "torchrelay save", "torchrelay (no save)"
"""Names of the thread, for people who look at stacks."""
PATIENCE_SECS = 10.0
LOOK_SECS = 5.0
"""How often whoever waits looks whether the thread is there at all."""

Works = SimpleQueue[tuple[Callable[[], None], threading.Event] | None]
"""What is to be done, and what is set then."""


class Standby:
    """Does one work after the other in one thread, which ends with this object at the latest."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._works: Works = SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def ready(self) -> bool:
        """Have the thread; False where this process gets no more threads."""
        if self.alive:
            return True
        works: Works = SimpleQueue()
        thread = threading.Thread(target=_work_off, args=(works,), name=STANDS_BY, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        except BaseException:  # an interrupt, when the thread is there already: nobody would end it
            works.put(None)
            raise
        self._thread, self._works = thread, works
        self._end = weakref.finalize(self, works.put, None)
        return True

    def hand(self, work: Callable[[], None]) -> threading.Event | None:
        """Have the thread do this next, which must not raise; what to `wait` for. None without a thread."""
        if not self.ready() or self._thread is None:
            return None
        over = threading.Event()
        self._thread.name = SAVES
        self._works.put((work, over))
        return over

    def wait(self, over: threading.Event) -> None:
        """Return when a work that was handed over is done; at once where the thread is not there any more."""
        while self.alive and not over.wait(LOOK_SECS):
            pass

    @property
    def alive(self) -> bool:
        """Whether the thread is there; it is not in a process that was forked off."""
        return self._thread is not None and self._thread.is_alive()

    def dismiss(self) -> None:
        """End the thread, when it has done what was handed to it; another one is made for more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end()
            thread.join(PATIENCE_SECS)


def _work_off(works: Works) -> None:
    """Holds nothing of a work that is done."""
    while (handed := works.get()) is not None:
        work, over = handed
        try:
            work()
        finally:
            threading.current_thread().name = STANDS_BY
            over.set()
        del handed, work, over
