"""Ctrl-C that comes where it hurts: a real SIGINT, sent when the main thread has come to a function."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECS = 20.0


@contextmanager
def interrupted_in(function: str, begin: threading.Event, then: Callable[[], object]) -> Iterator[None]:
    """Interrupt this thread, the main one, in `function`, after `begin`; `then` is called when it has heard.

    Fails where it never came there.
    """
    heard, sent = threading.Event(), threading.Event()

    def handler(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        try:
            if begin.wait(SECS) and _main_thread_comes_to(function):
                sent.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                heard.wait(SECS)
        finally:
            then()

    before = signal.signal(signal.SIGINT, handler)
    other = threading.Thread(target=interrupt, daemon=True)
    other.start()
    try:
        yield
    finally:
        other.join(3 * SECS)
        signal.signal(signal.SIGINT, before)
    assert sent.is_set(), f"the main thread never came to {function}"


def _main_thread_comes_to(function: str) -> bool:
    ends = time.monotonic() + SECS
    while time.monotonic() < ends:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        if function in (one.name for one in traceback.extract_stack(frame)):
            return True
        time.sleep(0.001)
    return False
