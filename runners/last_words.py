"""What a process does in its last seconds, when it ends itself from a thread and no `finally` runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

SECS = 4.0
_words: list[Callable[[], None]] = []


def remember_last_words(say: Callable[[], None]) -> None:
    """Have this called, in a thread of its own, before the process ends itself."""
    _words.append(say)


def forget_last_words(say: Callable[[], None]) -> None:
    """It is not needed any more."""
    with suppress(ValueError):
        _words.remove(say)


def say_last_words(secs: float = SECS) -> None:
    """Call them all, side by side, and wait for at most so many seconds; never raises."""
    threads = [threading.Thread(target=_quietly, args=(say,), daemon=True) for say in list(_words)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(secs)


def _quietly(say: Callable[[], None]) -> None:
    with suppress(Exception):
        say()
