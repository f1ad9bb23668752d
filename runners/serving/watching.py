"""`--watch`: a thread that looks for newer epochs, loads them aside and puts them in place.

Requests that were accepted before are answered by the epoch that they met. What cannot be used is said once,
and the epoch that is served stays.
"""

from __future__ import annotations

import threading

from torchrelay.errors import RelayError
from torchrelay.runners.serving.meters import Meters
from torchrelay.runners.serving.served import Holder, Say, Source

EVERY_SECS = 1.0


class Watching:
    """Asks a source for what is newer, every so many seconds."""

    def __init__(self, source: Source, say: Say, every_secs: float = EVERY_SECS) -> None:
        self._source, self._say, self._every_secs = source, say, every_secs
        self._ended = threading.Event()
        self._said = ""
        self._thread: threading.Thread | None = None

    def start(self, holder: Holder, meters: Meters) -> None:
        """Begin, in a daemon thread."""
        self._thread = threading.Thread(
            target=self._run, args=(holder, meters), name="torchrelay serve watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a load that goes on is not waited for."""
        self._ended.set()

    def ended(self, secs: float) -> bool:
        """Whether no load goes on, after `stop`; waits for so long at most."""
        if self._thread is None:
            return True
        self._thread.join(secs)
        return not self._thread.is_alive()

    def look(self, holder: Holder, meters: Meters) -> None:
        """Look once, and put in place what is newer."""
        try:
            found = self._source.newer(holder.current)
        except (RelayError, OSError) as error:
            self._failed(meters, f"{error}")
        except Exception as error:  # of the user's code that makes the model
            self._failed(meters, f"{type(error).__name__}: {error}")
        else:
            self._said = ""
            if found is not None and not self._ended.is_set():
                holder.current = found
                meters.swaps.inc()
                self._say(f"epoch {found.epoch} of {found.name} is served now")

    def _run(self, holder: Holder, meters: Meters) -> None:
        while not self._ended.wait(self._every_secs):
            self.look(holder, meters)

    def _failed(self, meters: Meters, text: str) -> None:
        if text != self._said:
            meters.swap_failures.inc()
            self._say(f"the epoch that is served stays: {text}")
            self._said = text
