"""What went wrong, told on stderr; never at the price of waiting for whoever should read it."""

from __future__ import annotations

import select
import sys
from contextlib import suppress

_BYTES = 4096
"""What a pipe that is ready takes at once (PIPE_BUF of Linux)."""


def tell(what: str, more: str) -> None:
    """Write a line and the end of what belongs to it, at most 4096 bytes of ASCII.

    Both are dropped where stderr is closed, or a pipe that nobody empties.
    """
    text = more.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if _takes():
            sys.stderr.write(f"{what}\n{text[len(what) + 1 - _BYTES :]}")
            sys.stderr.flush()


def _takes() -> bool:
    """Whether a write does not wait; what is no file of the system never does."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return sys.stderr is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))
