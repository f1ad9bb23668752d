"""Moments for people."""

from __future__ import annotations

from datetime import datetime, timezone


def time_text(value: float) -> str:
    """Seconds since 1970 as a date, always UTC; what is no date stays a number."""
    try:
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # written by somebody else's clock
        return str(value)
