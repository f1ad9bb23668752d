"""A progress bar at the bottom of rank 0's terminal, and descriptions of long operations."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from torchrelay.checkpoint.storage.work import Work, works
from torchrelay.runners.monitoring.text import Sight, draws, duration, human_bytes, per_second, plain

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


_streams: list[tuple[TextIO, TextIO]] = []
"""The original stdout and stderr while a bar replaces them."""


_BAR = 20


def _give_back_in_child() -> None:
    """Restore the streams in a forked worker, whose copy of the bar's lock may be held forever."""
    if _streams:
        sys.stdout, sys.stderr = _streams.pop()


os.register_at_fork(after_in_child=_give_back_in_child)


class ProgressBar:
    """Drawn by `show`, removed by `close`; only for streams that `text.draws` accepts.

    rich respects NO_COLOR. stdout is written above the bar only if it is a terminal too; otherwise it is left
    alone.
    """

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

    def show(self, sight: Sight) -> None:
        """Draw the current state."""
        total, done = (sight.steps, sight.step) if sight.total_steps else (sight.last_epoch, sight.epoch)
        self._rich.update(
            self._task,
            total=total,
            completed=done if total is None else min(done, total),
            head=sight.where,
            tail=bar_tail(sight, self._rich.console.width - len(sight.where) - _BAR - 3),
            refresh=True,
        )

    def print(self, text: str, *, loud: bool = False) -> None:
        """Print a line above the bar."""
        self._rich.console.print(plain(text), style="bold" if loud else None, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar and restore stdout and stderr; a second call does nothing."""
        self._rich.stop()
        _streams.clear()


def bar_tail(sight: Sight, room: int) -> str:
    """Return the text after the bar within `room` columns.

    Order: long operation or metrics, rate, remaining time, newest save. The least important parts are omitted
    first; metrics are shown whole or not at all.
    """
    pace = per_second(sight.per_sec, sight.unit) if sight.per_sec is not None else ""
    eta = f"eta {duration(sight.eta_secs)}" if sight.eta_secs is not None else ""
    first = plain(sight.doing or sight.values)
    text = ""
    for parts in ((first, pace, eta, sight.ckpt), (first, pace, eta), (first, eta)):
        text = " | ".join(part for part in parts if part)
        if len(text) <= room:
            return text
    last = eta or pace
    left = room - len(last) - len(" | ")
    shown = sight.doing[: max(left, 0)] or sight.values_within(left)
    return " | ".join(part for part in (shown, last) if part)[: max(room, 0)]


LONG_SECS = 2.0
"""Shorter operations are not shown."""
LINE_SECS = 5.0
"""Between two lines about long operations, where nothing can be drawn."""
_REFRESH_SECS = 0.2


def long_work() -> Work | None:
    """The newest long operation of this process; None if there is none."""
    return next((work for work in reversed(works()) if work.secs >= LONG_SECS), None)


def working() -> str:
    """Return a description of the newest long operation of this process; empty if there is none."""
    work = long_work()
    return "" if work is None else in_words(work)


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
        """Write to the stream; a closed stream is ignored."""
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
