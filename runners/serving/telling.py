"""What is told on stdout and stderr; never at the price of waiting for whoever should read it."""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import TextIO

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
