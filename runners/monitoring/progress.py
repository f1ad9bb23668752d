"""Show the progress of a run and its long operations: a bar on rank 0's terminal, else lines.

A thread reads numbers that the training leaves in memory; the training never waits for it, and ranks do not
communicate. Rank 0 prints, every rank writes its lines to its own file (`RankLog`), and rank 0 writes
`live.json` for `torchrelay top`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from torchrelay.checkpoint.storage.work import Work, works
from torchrelay.runners.monitoring.text import (
    LEVELS,
    Moment,
    ProgressState,
    RankLog,
    draws,
    duration,
    eta_secs,
    human_bytes,
    per_second,
    plain,
    rate,
    stamped,
    steps_left,
)

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from torchrelay.runners.session.run_state import RunState


_streams: list[tuple[TextIO, TextIO]] = []
"""The original stdout and stderr while a bar replaces them."""


_BAR = 20


def _give_back_in_child() -> None:
    """Restore the streams in a forked worker, whose copy of the bar's lock may be held forever."""
    if _streams:
        sys.stdout, sys.stderr = _streams.pop()


os.register_at_fork(after_in_child=_give_back_in_child)


class ProgressBar:
    """Drawn by `show`, removed by `close`; a stdout that is not a terminal is left alone."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._rich: RichProgress = Progress(
            TextColumn("{task.fields[head]}", markup=False),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.fields[tail]}", markup=False),
            console=Console(file=stream, highlight=False),
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._rich.add_task("", total=None, head="", tail="")
        _streams.append((sys.stdout, sys.stderr))
        self._rich.start()

    def show(self, current: ProgressState) -> None:
        """Draw the current state."""
        total, done = (
            (current.steps, current.step) if current.total_steps else (current.last_epoch, current.epoch)
        )
        self._rich.update(
            self._task,
            total=total,
            completed=done if total is None else min(done, total),
            head=current.where,
            tail=bar_tail(current, self._rich.console.width - len(current.where) - _BAR - 3),
            refresh=True,
        )

    def print(self, text: str, *, loud: bool = False) -> None:
        """Print a line above the bar."""
        self._rich.console.print(plain(text), style="bold" if loud else None, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar and restore stdout and stderr; a second call does nothing."""
        self._rich.stop()
        _streams.clear()


def bar_tail(current: ProgressState, room: int) -> str:
    """Return the text after the bar within `room` columns.

    Order: long operation or metrics, rate, remaining time, newest save. The least important parts are omitted
    first; metrics are shown whole or not at all.
    """
    pace = per_second(current.per_sec, current.unit) if current.per_sec is not None else ""
    eta = f"eta {duration(current.eta_secs)}" if current.eta_secs is not None else ""
    first = plain(current.doing or current.values)
    text = ""
    for parts in ((first, pace, eta, current.ckpt), (first, pace, eta), (first, eta)):
        text = " | ".join(part for part in parts if part)
        if len(text) <= room:
            return text
    last = eta or pace
    left = room - len(last) - len(" | ")
    shown = current.doing[: max(left, 0)] or current.values_within(left)
    return " | ".join(part for part in (shown, last) if part)[: max(room, 0)]


LONG_SECS = 2.0
"""Shorter operations are not shown."""
LINE_SECS = 5.0
"""Between two lines about long operations, where nothing can be drawn."""
_REFRESH_SECS = 0.2


def long_work() -> Work | None:
    """The newest long operation of this process; None if there is none."""
    return next((work for work in reversed(works()) if work.secs >= LONG_SECS), None)


def in_words(work: Work) -> str:
    """Describe an operation: `saving epoch 3, 1.2 of 4.1 GB, 00:00:12 left`."""
    if work.nbytes is None:
        moved = f", {human_bytes(work.done)}" if work.done else ""
        return f"{work.what}{moved}, {duration(work.secs)}"
    left = work.secs_left
    ending = "" if left is None else f", {duration(left)} left"
    return f"{work.what}, {human_bytes(work.done)} of {human_bytes(work.nbytes)}{ending}"


class WorkLines:
    """Shows long operations as lines, the first at once, then one every few seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._next = write, float("-inf")

    def show(self, work: Work, note: str = "") -> None:
        """Write a line if it is time for one."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_SECS
            self._write(in_words(work) + note)

    def clear(self) -> None:
        """Lines stay."""


class WorkInPlace:
    """Shows long operations in one line of a notebook's output, which is written over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def show(self, work: Work, note: str = "") -> None:
        """Write over what is there."""
        filled = round(_BAR * work.done / work.nbytes) if work.nbytes else 0
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if work.nbytes else ""
        text = plain(f"{bar}{in_words(work)}{note}")
        self._put(f"\r{text.ljust(self._width)}")
        self._width = len(text)

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        if self._width:
            self._put(f"\r{' ' * self._width}\r")
            self._width = 0

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the stream was closed
            self._stream.write(text)
            self._stream.flush()


class WorkBar:
    """Shows long operations as a bar at the foot of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rich: RichProgress | None = None

    def show(self, work: Work, note: str = "") -> None:
        """Draw the bar, where the terminal has room for one beside the text."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        if self._rich is None:
            self._stream.write("\r\x1b[K")  # a line of progress may be there
            self._rich = Progress(
                BarColumn(bar_width=_BAR),
                TextColumn("{task.description}", markup=False),
                console=Console(file=self._stream, highlight=False, width=_columns(self._stream)),
                transient=True,
                auto_refresh=False,
            )
            self._rich.add_task("", total=work.nbytes)
            self._rich.start()
        text = plain(in_words(work) + note)
        room = self._rich.console.width - len(text) - 2
        bar = self._rich.columns[0]
        if isinstance(bar, BarColumn):
            bar.bar_width = max(0, min(_BAR, room))
        (task,) = self._rich.task_ids
        self._rich.update(task, description=text, total=work.nbytes, completed=work.done, refresh=True)

    def clear(self) -> None:
        """Remove the bar."""
        rich, self._rich = self._rich, None
        if rich is not None:
            rich.stop()


def _columns(stream: TextIO) -> int | None:
    """The width of this terminal: rich asks for that of stdin first."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def work_display(stream: TextIO | None, write: Callable[[str], None]) -> WorkBar | WorkInPlace | WorkLines:
    """A bar on a terminal, one line that changes in a notebook, else lines, which `write` prints."""
    if stream is not None and draws(stream):
        return WorkBar(stream)
    if stream is not None and type(stream).__module__.partition(".")[0] == "ipykernel":
        return WorkInPlace(stream)
    return WorkLines(write)


@contextmanager
def works_shown(
    write: Callable[[str], None], *, note: str = "", stream: TextIO | None = None
) -> Iterator[None]:
    """Show the long operations of the block on stderr, or another stream; `note` follows each text.

    A thread looks every fifth of a second. A block without long operations prints nothing.
    """
    display = work_display(stream or sys.stderr, write)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_REFRESH_SECS):
            work = long_work()
            if work is None:
                display.clear()
            else:
                display.show(work, note)

    thread = threading.Thread(target=watch, name="torchrelay-progress-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        display.clear()


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
        self._works: WorkBar | WorkInPlace | WorkLines | None = None
        """For long operations that the training waits for, where there is no bar."""
        self._printing = threading.RLock()
        self._waiting: deque[ProgressState] = deque(maxlen=None if every_secs == 0 else 1)
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
            self._works = work_display(out, self._print)
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
            self._waiting.append(replace(self._current(), metrics=metrics, doing="", done=True))
            if self._every_secs == 0:
                self._wake.set()

    # Lines

    def _print_waiting(self) -> None:
        while self._waiting:
            self._say(self._waiting.popleft())

    def _say(self, current: ProgressState) -> None:
        self._printed_at = time.monotonic()
        self.log.line(current.line)
        self._print(current.line)

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
        return self._stream or sys.stderr

    # The thread

    def _watch(self) -> None:
        noted, odd = time.monotonic(), False
        while not self._over:
            self._wake.wait(LOOK_SECS if self._bar is None else BAR_SECS)
            self._wake.clear()
            try:
                self._look()
                current = self._current()
                self._show(current)
                if self._note is not None and not self._over and time.monotonic() - noted >= LIVE_SECS:
                    noted = time.monotonic()
                    self._note(current.json())
            except Exception as error:  # no error may stop the training
                if not odd:
                    self.log.line(f"the progress cannot be shown: {type(error).__name__}: {error}", "W")
                odd = True

    def _show(self, current: ProgressState) -> None:
        """Update the bar, and print a line if the interval is over."""
        with self._printing:
            if self._bar is not None:
                self._bar.show(current)
            if self._works is not None:  # for a long save or load that the training waits for
                work, moments = long_work(), self._moments
                if work is not None and (not moments or time.monotonic() - moments[-1].secs >= LONG_SECS):
                    self._works.show(work)
                else:
                    self._works.clear()
            if time.monotonic() - self._printed_at < self._every_secs:
                return
            if self._waiting:
                self._print_waiting()
            elif current.epoch and self._bar is None and self._every_secs > 0:
                self._say(replace(current, doing=""))

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
        return max(self._epochs_done, self._state.epoch - 1) if self._state is not None else 0

    def _current(self) -> ProgressState:
        state = self._state
        if state is None:
            return ProgressState()
        moments, now = self._moments, time.monotonic()
        return ProgressState(
            epoch=state.epoch,
            last_epoch=self._last_epoch,
            step=state.step,
            steps=state.steps_of_epoch,
            total_steps=state.total_steps,
            metrics={**state.metrics, **state.own_metrics()},
            per_sec=rate(moments, RATE_SECS, now),
            eta_secs=eta_secs(self._left(state), rate(moments, ETA_SECS, now), state.secs_left),
            ckpt=self._ckpt,
            doing="" if (work := long_work()) is None else in_words(work),
        )

    def _left(self, state: RunState) -> int | None:
        last, total = self._last_epoch, state.total_steps
        if total:
            return steps_left(state.epoch, state.step, state.steps_of_epoch, last, total, state.limit_steps)
        return None if last is None else max(last - self._done, 0)
