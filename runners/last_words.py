"""What a process does in its last seconds, when it ends itself from a thread and no `finally` runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

SECS = 4.0
NOTE_SECS = 2.0
_words: list[Callable[[], None]] = []
_notes: list[Callable[[str, int], None]] = []


def remember_note(note: Callable[[str, int], None]) -> None:
    """Have this called with a reason and an exit code before a failure ends the process from a thread."""
    _notes.append(note)


def forget_note(note: Callable[[str, int], None]) -> None:
    """It is not needed any more; may be called again."""
    with suppress(ValueError):
        _notes.remove(note)


def note_failure(reason: str, code: int, secs: float = NOTE_SECS) -> None:
    """Have it noted, side by side, and wait for at most so many seconds; never raises."""
    _within(secs, [lambda note=note: note(reason, code) for note in list(_notes)])  # type: ignore[misc]


def remember_last_words(say: Callable[[], None]) -> None:
    """Have this called, in a thread of its own, before the process ends itself."""
    _words.append(say)


def forget_last_words(say: Callable[[], None]) -> None:
    """It is not needed any more."""
    with suppress(ValueError):
        _words.remove(say)


def say_last_words(secs: float = SECS) -> None:
    """Call them all, side by side, and wait for at most so many seconds each; never raises."""
    _within(secs, list(_words))


def end_process(code: int) -> None:
    """Flush what was printed and end this process at once, wherever its threads are.

    Of a run in a store what its files say is put up first, for at most four seconds.
    """
    say_last_words()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or the reader is gone
            continue
    os._exit(code)


def tell_stderr(text: str) -> None:
    """Print why this process ends; never raises. Whoever read it may be gone with the launcher."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def tell_stderr_within(text: str, secs: float = SECS) -> None:
    """The same for at most so many seconds: whoever read it may read no more, and keeps nobody from ending.

    Where no thread can be made nothing is told.
    """
    _within(secs, [lambda: tell_stderr(text)])


def _within(secs: float, calls: Sequence[Callable[[], None]]) -> None:
    threads = []
    for call in calls:
        thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
        with suppress(RuntimeError):  # no more threads in this process, which has to end all the same
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(secs)


def _quietly(call: Callable[[], None]) -> None:
    with suppress(Exception):
        call()
