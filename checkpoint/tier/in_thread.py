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
