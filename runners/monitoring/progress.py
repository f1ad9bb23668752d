"""Show the progress of a run: a bar on rank 0's terminal, else one line per interval.

A thread reads numbers that the training leaves in memory; the training never waits for it, and ranks do not
communicate. Rank 0 prints, every rank writes its lines to its own file (`RankLog`), and rank 0 writes
`live.json` for `torchrelay top`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

from torchrelay.runners.monitoring.progress_bar import (
    LONG_SECS,
    ProgressBar,
    WorkInPlace,
    WorkLines,
    long_work,
    work_display,
    working,
)
from torchrelay.runners.monitoring.text import (
    LEVELS,
    Moment,
    RankLog,
    Sight,
    draws,
    eta_secs,
    rate,
    stamped,
    steps_left,
)
from torchrelay.runners.session.run_state import RunState

BAR_SECS, LOOK_SECS, LIVE_SECS = 0.1, 0.5, 2.0
"""Intervals of drawing the bar, of polls without a bar, and of writing `live.json`."""
RATE_SECS, ETA_SECS = 30.0, 900.0
"""Time windows of the displayed rate, and of the rate for the estimated end."""
_MOMENTS = 2000
_JOIN_SECS = 2.0
Note = Callable[[dict[str, Any]], None]


class Progress:
    """Print progress to `stream` (stderr by default), so that stdout belongs to the program."""

    def __init__(
        self,
        log: RankLog,
        *,
        talks: bool = True,
        every_secs: float = 10.0,
        level: int = LEVELS["info"],
        stream: TextIO | None = None,
    ) -> None:
        self.log = log
        self.talks = talks and level <= LEVELS["info"]
        self._every_secs = every_secs
        self._stream = stream
        self._state: RunState | None = None
        self._last_epoch: int | None = None
        self._note: Note | None = None
        self._ckpt = ""
        self._epochs_done = 0
        self._moments: list[Moment] = []
        self._bar: ProgressBar | None = None
        self._works: WorkLines | WorkInPlace | None = None
        """For long operations that the training waits for, where there is no bar."""
        self._printing = threading.RLock()
        self._waiting: deque[Sight] = deque(maxlen=None if every_secs == 0 else 1)
        """Lines of finished epochs that wait for the thread or for the end of the interval."""
        self._printed_at = float("-inf")
        self._wake, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    # Life

    def begin(self, state: RunState, last_epoch: int | None, note: Note | None = None) -> None:
        """Start showing this run; `note` receives the current state every two seconds."""
        self._state, self._last_epoch, self._note = state, last_epoch, note
        self._printed_at = time.monotonic()
        out = self._out
        if self.talks and out is not None and draws(out):
            self._bar = ProgressBar(out)
        elif self.talks and self._every_secs > 0:
            found = work_display(out, self._print)
            self._works = found if isinstance(found, (WorkLines, WorkInPlace)) else None
        self._thread = threading.Thread(target=self._watch, name="torchrelay-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the bar and print pending lines; a second call does nothing."""
        thread, self._thread = self._thread, None
        self._over = True
        self._wake.set()
        if thread is not None:
            thread.join(_JOIN_SECS)
        if not self._printing.acquire(timeout=_JOIN_SECS):
            return  # the reader has stopped reading; the exit must not wait for it
        try:
            works, self._works = self._works, None
            if works is not None:
                works.clear()
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()
            self._print_waiting()
        finally:
            self._printing.release()

    # Events

    def line(self, text: str) -> None:
        """Print a line at once."""
        with self._printing:
            self._print_waiting()
            self.log.line(text)
            self._print(text, loud=True)

    def saved(self, position: object, secs: float | None) -> None:
        """Record that the newest save took `secs`, or (None) failed."""
        self._ckpt = f"ckpt e{position} " + ("FAILED" if secs is None else f"ok {secs:.1f}s")

    def epoch(self, metrics: Mapping[str, float]) -> None:
        """Finish an epoch: the thread prints its line, at once or at the end of the interval."""
        if self._state is not None:
            self._epochs_done = self._state.epoch
            self._look()
            self._waiting.append(replace(self._sight(), metrics=metrics, doing="", done=True))
            if self._every_secs == 0:
                self._wake.set()

    # Lines

    def _print_waiting(self) -> None:
        """Print the pending lines of epochs."""
        while self._waiting:
            self._say(self._waiting.popleft())

    def _say(self, sight: Sight) -> None:
        """Print and log one state."""
        self._printed_at = time.monotonic()
        self.log.line(sight.line)
        self._print(sight.line)

    def _print(self, text: str, *, loud: bool = False) -> None:
        """Print one line, above the bar if there is one."""
        if not self.talks:
            return
        if self._bar is not None:
            self._bar.print(text, loud=loud)
            return
        if self._works is not None:
            self._works.clear()
        try:
            # One write: ranks share the stream, and lines must stay whole.
            out = self._out
            if out is not None:
                out.write(stamped(text, level="I", who=self.log.who) + "\n")
                out.flush()
        except (OSError, ValueError):  # the reader is gone
            self.talks = False

    @property
    def _out(self) -> TextIO | None:
        """The output stream."""
        return self._stream or sys.stderr

    # The thread

    def _watch(self) -> None:
        """Run the thread."""
        noted, odd = time.monotonic(), False
        while not self._over:
            self._wake.wait(LOOK_SECS if self._bar is None else BAR_SECS)
            self._wake.clear()
            try:
                self._look()
                sight = self._sight()
                self._show(sight)
                if self._note is not None and not self._over and time.monotonic() - noted >= LIVE_SECS:
                    noted = time.monotonic()
                    self._note(sight.json())
            except Exception as error:  # no error may stop the training
                if not odd:
                    self.log.line(f"the progress cannot be shown: {type(error).__name__}: {error}", "W")
                odd = True

    def _show(self, sight: Sight) -> None:
        """Update the bar, and print a line if the interval is over."""
        with self._printing:
            if self._bar is not None:
                self._bar.show(sight)
            self._show_works()
            if time.monotonic() - self._printed_at < self._every_secs:
                return
            if self._waiting:
                self._print_waiting()
            elif sight.epoch and self._bar is None and self._every_secs > 0:
                self._say(replace(sight, doing=""))

    def _show_works(self) -> None:
        """Show a long save or load while the training waits for it."""
        works, moments = self._works, self._moments
        if works is None:
            return
        work = long_work()
        waits = not moments or time.monotonic() - moments[-1].secs >= LONG_SECS
        if work is not None and waits:
            works.show(work)
        else:
            works.clear()

    def _look(self) -> None:
        """Record finished steps, or epochs if steps are not counted."""
        state = self._state
        if state is None or not state.epoch:
            return
        moment = Moment(time.monotonic(), float(state.total_steps or self._done))
        known = self._moments
        if known and moment.done < known[-1].done:
            known.clear()  # another state was loaded
        if not known:
            began = float(state.steps_at_begin or state.epoch - 1)
            known.append(Moment(state.epoch_began_secs, min(began, moment.done)))
        if moment.done == known[-1].done:
            return
        if len(known) >= 2 and moment.secs - known[-2].secs < LOOK_SECS:
            known.pop()
        known.append(moment)
        del known[:-_MOMENTS]

    @property
    def _done(self) -> int:
        """Number of finished epochs."""
        return max(self._epochs_done, self._state.epoch - 1) if self._state is not None else 0

    def _sight(self) -> Sight:
        """Return the current state."""
        state = self._state
        if state is None:
            return Sight()
        moments, now = self._moments, time.monotonic()
        return Sight(
            epoch=state.epoch,
            last_epoch=self._last_epoch,
            step=state.step,
            steps=state.steps_of_epoch,
            total_steps=state.total_steps,
            metrics={**state.metrics, **state.own_metrics()},
            per_sec=rate(moments, RATE_SECS, now),
            eta_secs=eta_secs(self._left(state), rate(moments, ETA_SECS, now), state.secs_left),
            ckpt=self._ckpt,
            doing=working(),
        )

    def _left(self, state: RunState) -> int | None:
        """Return the remaining steps or epochs."""
        last, total = self._last_epoch, state.total_steps
        if total:
            return steps_left(state.epoch, state.step, state.steps_of_epoch, last, total, state.limit_steps)
        return None if last is None else max(last - self._done, 0)
