"""What a page is made of: numbers and times in words, sections, tables, charts.

Charts are shapes, which a template writes as SVG: scales with round numbers, lines, bars, marks of starts.

Lines leave out nan and infinite values, which are marked at the upper edge.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from torchrelay.records import dataclass


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


def filled(table: Table) -> Table:
    """The table without columns that have no text in any row."""
    used = [at for at in range(len(table.columns)) if not at or any(row[at] for row in table.rows)]
    rows = [[row[at] for at in used] for row in table.rows]
    return table._replace(columns=[table.columns[at] for at in used], rows=rows)


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


def count(number_of: int, one: str) -> str:
    """`1 epoch`, `7 epochs`."""
    return f"{number_of} {one if number_of == 1 else one + 's'}"


_LARGEST, _SMALLEST = sys.float_info.max, 5e-324
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto pixels from `start` to `end`, linear or by logarithm (`low` > 0)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value, kept inside of the scale."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log(max(one, _SMALLEST)) for one in (low, high, at))
        share = (at / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5  # never too large
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))


def scale_of(values: Sequence[float], start: float, end: float, *, log: bool = False) -> Scale:
    """A scale for finite values with a little room around them; one value alone gets room as well."""
    low, high = min(values), max(values)
    if log:
        factor = math.exp((math.log(high) - math.log(low)) * 0.05) if high > low else 2.0
        return Scale(max(low / factor, _SMALLEST), min(high * factor, _LARGEST), start, end, log=True)
    room = (high * 0.06 - low * 0.06) or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 and low - room < 0 else max(low - room, -_LARGEST)
    return Scale(floor, min(high + room, _LARGEST), start, end)


def ticks(scale: Scale, wanted: int = 5) -> list[float]:
    """Round values inside of a scale, about as many as wanted, at least one."""
    if scale.log:
        low, high = math.floor(math.log10(scale.low)), min(308, math.ceil(math.log10(scale.high)))
        stride, multiples = max(1, (high - low) // wanted), (1, 2, 5) if high - low <= 2 else (1,)
        decades = (factor * 10.0**power for power in range(low, high + 1, stride) for factor in multiples)
        inside = [one for one in decades if scale.low <= one <= scale.high]
        return inside or [math.sqrt(scale.low) * math.sqrt(scale.high)]
    span = scale.high - scale.low
    if not 0 < span < math.inf:
        return [scale.low]
    raw = span / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in _STEPS if power * one >= raw * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    count = int((scale.high - first * step) / step + 1e-9) + 1
    digits = max(0, 2 - math.floor(math.log10(step)))  # 0.30000000000000004 is 0.3
    found = (round((first + index) * step, digits) + 0.0 for index in range(max(0, min(count, 50))))
    return list(dict.fromkeys(found)) or [scale.low]  # steps too fine for doubles fall together


def whole_ticks(low: int, high: int, wanted: int = 6) -> list[int]:
    """Whole numbers from `low` to `high`, evenly spaced by a round step."""
    raw = max(1.0, (high - low) / max(1, wanted))
    power = 10 ** math.floor(math.log10(raw))
    step = next(int(power * one) for one in (1, 2, 5, 10) if power * one >= raw)
    return list(range(-(-low // step) * step, high + 1, step))


def clock_ticks(span: float, wanted: int = 5) -> list[float]:
    """Seconds from 0 to `span` at steps that people count in."""
    if span < wanted:
        return ticks(Scale(0.0, max(span, 1e-9), 0, 1), wanted)
    days = 86400 * math.ceil(span / wanted / 86400)
    step = next((one for one in _CLOCK_STEPS if one * wanted >= span), days)
    return [float(one) for one in range(0, int(span) + 1, step)]


@dataclass(frozen=True)
class Shape:
    """An element of a drawing: its place, its CSS class, and the text under the pointer."""

    tag: str
    style: str
    place: Mapping[str, float | str] = field(default_factory=dict)
    text: str = ""
    title: str = ""
    inside: Sequence[Shape] = ()


def rect(style: str, x: float, y: float, width: float, height: float) -> Shape:
    """A bar; one of no size keeps its place."""
    size = {"width": max(0.0, width), "height": max(0.0, height)}
    return Shape("rect", style, {"x": x, "y": y, **size})


def path(style: str, d: str, title: str = "") -> Shape:
    """A line of SVG's own commands."""
    return Shape("path", style, {"d": d}, title=title)


def dot(style: str, x: float, y: float, radius: float, title: str = "") -> Shape:
    """A point."""
    return Shape("circle", style, {"cx": x, "cy": y, "r": radius}, title=title)


def line(style: str, x: Sequence[float | str], y: Sequence[float]) -> Shape:
    """A straight one."""
    return Shape("line", style, {"x1": x[0], "x2": x[1], "y1": y[0], "y2": y[1]})


def word(text: str, x: float | str, y: float, style: str = "tick middle") -> Shape:
    """A text in a drawing."""
    return Shape("text", style, {"x": x, "y": y}, text)


@dataclass(frozen=True)
class Chart:
    """A drawing; `label` is its name for screen readers, `data` are more attributes.

    A `width` of 0 is a drawing whose places are shares of the width that the page has for it.
    """

    label: str
    width: float
    height: float
    shapes: Sequence[Shape]
    style: str = "chart"
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A chart or a table of shades in a card: `eyebrow` names the subject, `finding` is its title.

    `log` is the same chart with a logarithmic scale, shown instead while the switch `switch` is on.
    """

    eyebrow: str
    finding: str
    chart: Chart | None = None
    log: Chart | None = None
    switch: str = ""
    heat: Table | None = None
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM, _AXIS_ROW = 48, 16, 16, 28, 15
_MOST_POINTS = 400
Pairs = Sequence[tuple[int, float]]


_COLOURS = 8
_PATTERNS = ("", " dashed", " mixed")


def hue(colour: int) -> str:
    """Return the CSS classes of a line: eight colours, the same in dashes, then in dashes and dots."""
    pattern = _PATTERNS[(colour - 1) // _COLOURS % len(_PATTERNS)]
    return f"s{(colour - 1) % _COLOURS + 1}{pattern}"


@dataclass(frozen=True)
class Series:
    """A line: `colour` from 1 (see `hue`), `stale` for what was abandoned (dotted)."""

    name: str
    colour: int
    points: tuple[tuple[int, float], ...]
    stale: bool = False


@dataclass(frozen=True)
class EpochMarker:
    """Something at an epoch: `kind` is `resume`, `rewind`, `fallback` or `best`."""

    kind: str
    epoch: int
    text: str
    colour: int = 1
    value: float | None = None


Steps = Sequence[tuple[int, int]]
"""The step of the run at the end of each epoch, for a second axis below a chart."""


def _other_ticks(counts: Steps, unit: str, x: Scale) -> list[tuple[int, str]]:
    """Places on an axis of `unit`, each with its label on the other axis."""
    if unit == "epoch":
        steps = dict(counts)
        return [(one, compact(steps[one])) for one in whole_ticks(int(x.low), int(x.high)) if one in steps]
    ends = {epoch: step for epoch, step in counts if x.low <= step <= x.high}
    if not ends:
        return []
    return [(ends[one], str(one)) for one in whole_ticks(min(ends), max(ends)) if one in ends]


_OTHER = {"epoch": "step", "step": "epoch"}


def compact(count: int) -> str:
    """`950`, `1.5k`, `48k`, `2M`: a number of steps below an axis."""
    for size, sign in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{sign}"
    return str(count)


def line_chart(
    label: str,
    series: Sequence[Series],
    marks: Sequence[EpochMarker] = (),
    *,
    log: bool = False,
    unit: str = "epoch",
    span: tuple[int, int] | None = None,
    counts: Steps = (),
) -> Chart | None:
    """Series over epochs or steps, values that are not finite as crosses; None without values.

    Args:
        label: Its name for screen readers.
        series: The lines.
        marks: Resumes, rewinds, and the best epoch.
        log: Use a logarithmic scale; values that are not positive are left out.
        unit: What the horizontal axis counts, "epoch" or "step".
        span: First and last of it, so that charts beside each other compare; by default those of the series.
        counts: For a second row of labels: steps below epochs, epochs below steps.
    """
    finite = [value for one in series for _, value in one.points if _plottable(value, log)]
    epochs = [epoch for one in series for epoch, _ in one.points] + list(span or ())
    if not epochs or (log and not finite):
        return None
    x = Scale(min(epochs), max([*epochs, min(epochs) + 1]), LEFT, WIDTH - RIGHT)
    below = _other_ticks(counts, unit, x)
    height = HEIGHT + (_AXIS_ROW if below else 0)
    y = scale_of(finite or [0.0, 1.0], HEIGHT - BOTTOM, TOP, log=log)
    frame = [x.low, x.high, x.start, x.end, y.low, y.high, y.start, y.end, int(log)]
    shapes = [
        *value_axis(y, x.start, number if finite else lambda _: "", 5),
        word(unit, 4, HEIGHT - 9, "tick axisname"),
        *(word(str(one), x(one), HEIGHT - 9) for one in whole_ticks(int(x.low), int(x.high))),
        *(word(_OTHER[unit], 4, height - 9, "tick axisname") for _ in below[:1]),
        *(word(text, x(place), height - 9, "tick middle") for place, text in below),
        line("axis", (LEFT, WIDTH - RIGHT), (y.start, y.start)),
        *(_mark(one, x, y) for one in marks if one.kind != "best"),
        *(_line(one, x, y) for one in sorted(series, key=lambda one: not one.stale)),
        *(cross for one in series for cross in _missing(one, x, unit)),
        *(_mark(one, x, y) for one in marks if one.kind == "best"),
    ]
    hover = {"data-unit": unit, "data-series": _hover_data(series), "data-frame": json.dumps(frame)}
    if below and len(counts) <= _MOST_POINTS:  # for values under the pointer
        pairs = [pair if unit == "epoch" else pair[::-1] for pair in counts]
        hover["data-other"] = json.dumps([_OTHER[unit], pairs])
    style = f"chart line-chart {'log' if log else 'linear'}"
    return Chart(label, WIDTH, height, shapes, style, {"tabindex": "0", **hover})


def spark(label: str, points: Pairs) -> Chart:
    """A line without numbers, for a cell of a table."""
    x = Scale(points[0][0], points[-1][0], 2, 118)
    y = scale_of([value for _, value in points], 25, 3)
    return Chart(label, 120, 28, [path("line s1", _path(thinned(points, 120), x, y))], "spark")


def value_axis(y: Scale, left: float, show: Callable[[float], str], wanted: int) -> list[Shape]:
    """Lines across the drawing at round values, with labels at the left."""
    found = []
    for value in ticks(y, wanted):
        found.append(line("grid", (left, WIDTH - RIGHT), (y(value), y(value))))
        found.append(word(show(value), left - 6, y(value) + 3.5, "tick end"))
    return found


def thinned(points: Pairs, most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Fewer points of the same look: of each stretch the smallest and the largest value, ends always."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(2 * len(points) / most)
    kept: list[tuple[int, float]] = [points[0]]
    for at in range(0, len(points), width):
        some = points[at : at + width]
        ends = {min(some, key=_by_value), max(some, key=_by_value)}
        kept += sorted(ends | {one for one in some if not math.isfinite(one[1])})
    return sorted({*kept, points[-1]})


def _by_value(point: tuple[int, float]) -> float:
    return point[1] if math.isfinite(point[1]) else 0.0


def _plottable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _path(points: Iterable[tuple[int, float]], x: Scale, y: Scale) -> str:
    """The line through all values that have a place; the others part it."""
    parts, pen = list[str](), "M"
    for epoch, value in points:
        if _plottable(value, y.log):
            parts.append(f"{pen}{x(epoch):.1f} {y(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _line(series: Series, x: Scale, y: Scale) -> Shape:
    shown = thinned(series.points)
    drawn = [path(f"line {hue(series.colour)}{' stale' if series.stale else ''}", _path(shown, x, y))]
    finite = [one for one in shown if _plottable(one[1], y.log)]
    if len(finite) <= 40 and not series.stale:
        drawn += [dot(f"dot {hue(series.colour)}", x(epoch), y(value), 2.1) for epoch, value in finite]
    return Shape("g", "", inside=drawn)


def _missing(series: Series, x: Scale, unit: str) -> list[Shape]:
    """A cross at the upper edge per value that no line can show, at most a hundred."""
    odd = [(epoch, value) for epoch, value in series.points if not math.isfinite(value)]
    return [
        path(
            f"cross {hue(series.colour)}",
            f"M{x(epoch) - 3:.1f} {TOP - 9}l6 6m0 -6l-6 6",
            f"{series.name}: {number(value)} at {unit} {epoch}",
        )
        for epoch, value in thinned(odd, 100)[:100]
    ]


def _mark(mark: EpochMarker, x: Scale, y: Scale) -> Shape:
    """Resume points on, a rewind points back, a fallback down."""
    at, top = x(mark.epoch), y.end - 8
    if mark.kind == "best":
        place = y(mark.value) if mark.value is not None else y.end
        return dot(f"best {hue(mark.colour)}", at, place, 5.5, mark.text)
    signs = {
        "resume": f"M{at - 3:.1f} {top - 4:.1f}l7 4l-7 4z",
        "rewind": f"M{at + 3:.1f} {top - 4:.1f}l-7 4l7 4z",
    }
    sign = path("sign", signs.get(mark.kind, f"M{at - 4:.1f} {top - 3:.1f}l4 7l4 -7z"))
    stem = line("stem", (at, at), (y.end - 4, y.start))
    return Shape("g", f"mark {mark.kind}", title=mark.text, inside=(stem, sign))


def brief(text: str, most: int = 34) -> str:
    """A long name in at most so many characters, its middle left out."""
    head = most // 3
    return text if len(text) <= most else f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


def _hover_data(series: Sequence[Series]) -> str:
    said = []
    for one in series:
        shown = thinned(one.points)
        values = [[epoch, value if math.isfinite(value) else number(value)] for epoch, value in shown]
        said.append([one.name, (one.colour - 1) % _COLOURS + 1, int(one.stale), values])
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))
