"""What a page is made of: numbers and times in words, sections, tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple


class PageSection(NamedTuple):
    """A part of the page: `name` is its anchor and the macro in `report.html` that draws its `content`."""

    name: str
    link: str
    title: str
    content: dict[str, Any]


class Cell(NamedTuple):
    """A number on its shade: the number says it too, so colour is never alone."""

    text: str
    style: str
    title: str = ""


class Table(NamedTuple):
    """Rows of texts and cells; `numeric` aligns all but the first column to the right."""

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numeric: bool = False


_SHADES = 7


def shade(value: float, top: float) -> str:
    """The class of a cell: stronger for what is larger, up to `top`."""
    level = min(_SHADES, int((value / top) ** 0.5 * _SHADES) + 1) if top > 0 and value > 0 else 0
    return f"cell h{level}"


def visible(text: str) -> str:
    """Text with what a page cannot hold (control characters, lone surrogates) replaced by a sign."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t " else "\N{REPLACEMENT CHARACTER}" for c in text)


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
