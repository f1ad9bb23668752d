"""A progress bar at the bottom of rank 0's terminal, and descriptions of long operations."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from torchrelay.checkpoint.storage.work import Work, works
from torchrelay.runners.monitoring.text import Sight, duration, human_bytes, per_second, plain

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
_REFRESH_SECS = 0.2


def working() -> str:
    """Return a description of the newest long operation of this process; empty if there is none."""
    return next((in_words(work) for work in reversed(works()) if work.secs >= LONG_SECS), "")


def in_words(work: Work) -> str:
    """Describe an operation: `saving epoch 3, 1.2 of 4.1 GB, 00:00:12 left`."""
    if work.nbytes is None:
        moved = f", {human_bytes(work.done)}" if work.done else ""
        return f"{work.what}{moved}, {duration(work.secs)}"
    left = work.secs_left
    ending = "" if left is None else f", {duration(left)} left"
    return f"{work.what}, {human_bytes(work.done)} of {human_bytes(work.nbytes)}{ending}"


@contextmanager
def shown(show: Callable[[str], None]) -> Iterator[None]:
    """Have a thread call `show` with the long operation of the block, and finally with an empty text."""
    over = threading.Event()

    def watch() -> None:
        said = ""
        while not over.wait(_REFRESH_SECS):
            text = working()
            if text or said:
                show(text)
            said = text

    thread = threading.Thread(target=watch, name="torchrelay-headway", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        show("")
