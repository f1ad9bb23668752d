"""The form of the lines that people and programs read: time, level, who says it, what."""

from __future__ import annotations

import os
import time
from typing import TextIO

from torchrelay.errors import UsageError

LEVELS = {"info": 0, "warning": 1}
LEVEL = "TORCHRELAY_LOG_LEVEL"
EVERY = "TORCHRELAY_LOG_EVERY_N_SECS"
EVERY_SECS = 10.0
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def stamped(text: str, *, level: str, who: str, when: float | None = None) -> str:
    """`2026-11-20 22:07:24 I r0/16 text`; the time is UTC, so that the lines of all hosts compare."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() if when is None else when))
    return f"{clock} {level} {who} {plain(text)}"


def plain(text: str) -> str:
    """One line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text.strip())


def level_wanted() -> int:
    """What TORCHRELAY_LOG_LEVEL lets through to stderr; UsageError for a word that is none."""
    word = os.environ.get(LEVEL, "").strip().lower() or "info"
    if word not in LEVELS:
        raise UsageError(f"{LEVEL} is {word!r:.40}; it is info, or warning for warnings alone")
    return LEVELS[word]


def interval_secs(wanted: float | None) -> float:
    """Seconds between two lines: TORCHRELAY_LOG_EVERY_N_SECS, else what the program says, else 10.

    0 is a line for every epoch and none between. Raises UsageError for what is no such number.
    """
    text = os.environ.get(EVERY, "").strip()
    name, given = (EVERY, text) if text else ("log_every_n_secs", wanted)
    if given is None:
        return EVERY_SECS
    try:
        secs = float(given) if not isinstance(given, bool) else -1.0
    except (TypeError, ValueError):
        secs = -1.0
    if not 0 <= secs < 1e9:
        raise UsageError(f"{name} is {given!r:.40}; it is a number of seconds, 0 for a line per epoch")
    return secs


def human_bytes(count: int | None) -> str:
    """`1.5 MB`: powers of 1000, three figures."""
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def draws(stream: TextIO | None) -> bool:
    """Whether something may be drawn and written over there: a terminal, and one that can.

    Python has None for a stream that was closed before it began.
    """
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False
