"""A thread that uploads in the background of a training, as the near place of a tier and runs in stores do.

It waits for work, does it one step at a time, tries a step that failed again after a pause that grows, and
ends when it is stopped, or when somebody else holds by now what it uploads to.
"""

from __future__ import annotations

import threading

from torchrelay.errors import FencedError

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.5, 60.0
STOP_SECS = 30.0
"""How long the end of a run waits for a call that is under way when nothing more is to be sent."""


class StoppedError(Exception):
    """Whoever waits for the upload does so no longer."""


class Uploader:
    """Begins with `start`. Subclasses say what a step is, and what becomes of its errors."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._awake, self._stopping = True, False
        self._fenced: FencedError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with what an earlier start left."""
        self._thread.start()

    def wake(self) -> None:
        """There is something new; returns at once."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    def stop(self, secs: float = STOP_SECS) -> bool:
        """End the thread at its next piece; what is not sent stays. False if a call does not return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(secs)
        return not self._thread.is_alive()

    # In the thread

    def _run(self) -> None:
        pause = 0.0
        while self._is_wanted(pause):
            try:
                while not self._stopping and self._step():
                    self._tell_waiting()
                pause = 0.0
            except StoppedError:
                return
            except FencedError as error:
                self._fenced = error
                self._tell_waiting()
                return
            except Exception as error:  # whatever a client of a store raises, the training goes on
                pause = min(max(2 * pause, FIRST_PAUSE_SECS), LONGEST_PAUSE_SECS)
                self._failed(error)

    def _is_wanted(self, pause: float) -> bool:
        """Return when there is something to do, or `pause` seconds after a failure; False at the end."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._stopping, pause)
            else:
                self._changed.wait_for(lambda: self._awake or self._stopping, self._look_secs())
            self._awake = False
            return not self._stopping

    def _look_secs(self) -> float | None:
        """After how long there may be something to do though nobody said so; None: never."""
        return None

    def _step(self) -> bool:
        """Do one thing; False where nothing is left to do."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        """Keep for people what a step raised."""
        raise NotImplementedError

    def _check_going_on(self) -> None:
        """Called between pieces; what it raises ends the upload."""
        if self._stopping:
            raise StoppedError

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()
