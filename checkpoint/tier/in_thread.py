"""What the threads of a tier have in common: they come after the training, and try again after a pause."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.5, 60.0
STOP_SECS = 30.0
"""How long the end of a run waits for a call that is under way when nothing more is to be sent."""
_NICE = 10


def yield_to_training() -> None:
    """From now on this thread, and those that it starts, come after others; Linux alone can say so of one."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def longer(pause: float) -> float:
    """How long to wait after one more failure."""
    return min(max(2 * pause, FIRST_PAUSE_SECS), LONGEST_PAUSE_SECS)


class Awaiting:
    """A thread's work: it waits for something to do, or until a failed step is due again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._awake, self._stopping = True, False

    def _is_wanted(self, pause: float, look: float | None = None) -> bool:
        """Return when there is something to do, or `pause` seconds after a failure; False at the end.

        With `look` there may be something to do after so many seconds, too.
        """
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._stopping, pause)
            else:
                self._changed.wait_for(lambda: self._awake or self._stopping, look)
            self._awake = False
            return not self._stopping
