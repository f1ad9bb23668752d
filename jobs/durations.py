"""Lengths of time as people write them: seconds, units, clocks."""

from __future__ import annotations

import re
from datetime import timedelta

_UNITS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)")


def seconds_in(limit: object) -> float | None:
    """Seconds of `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"`, a timedelta; None for anything else.

    The number may be zero, negative or not finite: who asks says what is allowed.
    """
    if isinstance(limit, timedelta):
        return limit.total_seconds()
    if isinstance(limit, (int, float)) and not isinstance(limit, bool):
        return float(limit)
    if not isinstance(limit, str):
        return None
    text = limit.strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) <= 9 else None
    found = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    if found is None or not text:
        return None
    days, hours, minutes, secs = (int(part or 0) for part in found.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + secs
