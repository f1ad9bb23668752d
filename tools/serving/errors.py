"""Why a request gets no answer, in the words of HTTP; and what is told on stdout and stderr."""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import TextIO

BUSY_SECS = 1
"""When to come again where there is too much to do."""


class RefusedError(Exception):
    """A request that is not answered: a status and one sentence for the client.

    Below 500 it is the client's; 429 and 503 say when to come again (`retry_secs`).
    """

    def __init__(self, status: int, text: str, retry_secs: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.retry_secs = status, text, retry_secs


def wrong(text: str, status: int = 400) -> RefusedError:
    """A request that cannot be understood."""
    return RefusedError(status, text)


def busy(text: str) -> RefusedError:
    """Too much is asked at once: 429."""
    return RefusedError(429, text, BUSY_SECS)


def unavailable(text: str, retry_secs: int = BUSY_SECS) -> RefusedError:
    """The server cannot answer now: 503."""
    return RefusedError(503, text, retry_secs)


class FaultyAnswerError(RuntimeError):
    """What the model made of good samples is no answer: the fault is on this side, so that it is a 500."""


_BYTES = 4096
"""What a pipe that is ready takes at once (PIPE_BUF of Linux)."""


def tell(what: str, more: str) -> None:
    """Write a line and the end of what belongs to it, at most 4096 bytes of ASCII.

    Both are dropped where stderr is closed, or a pipe that nobody empties.
    """
    text = more.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if takes(sys.stderr):
            sys.stderr.write(f"{what}\n{text[len(what) + 1 - _BYTES :]}")
            sys.stderr.flush()


def takes(stream: TextIO | None) -> bool:
    """Whether a short write does not wait; what is no file of the system never does."""
    try:
        descriptor = stream.fileno()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return stream is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))
