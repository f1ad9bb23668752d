"""`writer.json`: a counter that moves while its writer lives, and watching that of another.

It proves nothing about the log; it only tells a would-be writer that somebody is there. Whoever
reads it measures with his own monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.storage.base import Storage

PATH = "writer.json"
LIMIT_BYTES = 4096
PERIOD_SECS = 1.0
PATIENCE_SECS = 15.0
_LOOKS = 60
"""How often a watched counter is read within the patience."""


class Beat:
    """A small thread that calls `beat(count)` every period until that returns False or `stop()` is called.

    An exception that is an OSError is tried again next time: a counter that cannot be written does
    not move, and then others take over, which is right.
    """

    def __init__(self, beat: Callable[[int], bool], period_secs: float) -> None:
        self._beat, self._period_secs, self._stopped = beat, period_secs, Event()
        self._thread = Thread(target=self._run, name="torchrelay-writer-counter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the last beat to end."""
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        count = 1
        while not self._stopped.wait(self._period_secs):
            count += 1
            try:
                if not self._beat(count):
                    return
            except OSError:
                continue


def move(storage: Storage, generation: int, nonce: str, count: int) -> None:
    """Write the counter."""
    data = canonical_json.dumps({"generation": generation, "nonce": nonce, "counter": count})
    storage.replace(PATH, data)


def moves(storage: Storage, patience_secs: float) -> bool:
    """Watch somebody's counter; True as soon as it moves, False when it stood still all the time."""
    before = _look(storage)
    until = time.monotonic() + patience_secs
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, patience_secs / _LOOKS))
        if _look(storage) != before:
            return True
    return False


def _look(storage: Storage) -> bytes | None:
    try:
        return storage.read_range(PATH, 0, LIMIT_BYTES)
    except FileNotFoundError:
        return None
