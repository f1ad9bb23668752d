"""Long works in words: what, how much of it, how long it will still take; shown on a terminal alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrelay.checkpoint.storage.inflight import Work, works
from torchrelay.runners.pace import duration
from torchrelay.runners.wording import human_bytes

LONG_SECS = 2.0
"""Works that take no longer are not spoken of."""
_REFRESH_SECS = 0.2


def working() -> str:
    """The newest work of this process that takes long; empty where there is none."""
    return next((in_words(work) for work in reversed(works()) if work.secs >= LONG_SECS), "")


def in_words(work: Work) -> str:
    """`saving epoch 3, 1.2 of 4.1 GB, 00:00:12 left`."""
    if work.nbytes is None:
        moved = f", {human_bytes(work.done)}" if work.done else ""
        return f"{work.what}{moved}, {duration(work.secs)}"
    left = work.secs_left
    ending = "" if left is None else f", {duration(left)} left"
    return f"{work.what}, {human_bytes(work.done)} of {human_bytes(work.nbytes)}{ending}"


@contextmanager
def shown(show: Callable[[str], None]) -> Iterator[None]:
    """Have a thread call `show` with the long work of the block, at last with nothing."""
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
