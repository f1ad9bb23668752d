"""How numbers and times are written on the page."""

from __future__ import annotations

import math
from datetime import datetime, timezone


def number(value: float) -> str:
    """A measured value in at most four figures; nan and inf by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else "\N{MINUS SIGN}\N{INFINITY}"
    text = f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def seconds(value: float) -> str:
    """`4.2 ms`, `3.1 s`, `12 min`, `5 h 20 min`."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 99.5:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def moment(value: float | None) -> str:
    """A time in UTC; what no clock can have said is written as it is."""
    if value is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return str(value)


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if 9.95 <= percent < 9999.5 else f"{percent:.2g} %"


def count(number_of: int, one: str, many: str | None = None) -> str:
    """`1 epoch`, `7 epochs`."""
    return f"{number_of} {one if number_of == 1 else many or one + 's'}"
