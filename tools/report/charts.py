"""A small line chart as SVG: scales with round numbers, series over epochs, marks of later starts.

Values that are nan or infinite are no points of a line; they are marked at the upper edge.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

from torchrelay.records import dataclass
from torchrelay.tools.report.html import Markup, el, number

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
        low, high, at = (
            (math.log(max(one, _SMALLEST)) for one in (self.low, self.high, value))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
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
        return _log_ticks(scale, wanted)
    span = scale.high - scale.low
    if not 0 < span < math.inf:
        return [scale.low]
    raw = span / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in _STEPS if power * one >= raw * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    count = int((scale.high - first * step) / step + 1e-9) + 1
    found = (_clean((first + index) * step, step) for index in range(max(0, min(count, 50))))
    return list(dict.fromkeys(found)) or [scale.low]  # steps too fine for doubles fall together


def whole_ticks(low: int, high: int, wanted: int = 6) -> list[int]:
    """Whole numbers from `low` to `high`, evenly spaced by a round step."""
    raw = max(1.0, (high - low) / max(1, wanted))
    power = 10 ** math.floor(math.log10(raw))
    step = next(int(power * one) for one in (1, 2, 5, 10) if power * one >= raw)
    return list(range(-(-low // step) * step, high + 1, step))


def clock_ticks(span: float, wanted: int = 6) -> list[float]:
    """Seconds from 0 to `span` at steps that people count in."""
    if span < wanted:
        return ticks(Scale(0.0, max(span, 1e-9), 0, 1), wanted)
    step = next(
        (one for one in _CLOCK_STEPS if one * wanted >= span), 86400 * math.ceil(span / wanted / 86400)
    )
    return [float(one) for one in range(0, int(span) + 1, step)]


def _log_ticks(scale: Scale, wanted: int) -> list[float]:
    low, high = math.floor(math.log10(scale.low)), min(308, math.ceil(math.log10(scale.high)))
    stride = max(1, (high - low) // wanted)
    multiples = (1, 2, 5) if high - low <= 2 else (1,)
    found = [factor * 10.0**power for power in range(low, high + 1, stride) for factor in multiples]
    inside = [one for one in found if scale.low <= one <= scale.high]
    return inside or [math.sqrt(scale.low) * math.sqrt(scale.high)]


def _clean(value: float, step: float) -> float:
    """0.30000000000000004 is 0.3."""
    digits = max(0, 2 - math.floor(math.log10(step)))
    return round(value, digits) + 0.0


WIDTH, HEIGHT = 360, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 16, 28
_MOST_POINTS = 400
Pairs = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Series:
    """A line: `colour` from 1 to 8, `stale` for what was abandoned (dashed)."""

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


def line_chart(
    label: str,
    series: Sequence[Series],
    marks: Sequence[EpochMarker] = (),
    *,
    log: bool = False,
    unit: str = "epoch",
) -> Markup:
    """The chart; `label` is its name for those who do not see it. Empty markup where nothing is finite."""
    finite = [value for one in series for _, value in one.points if _plottable(value, log)]
    epochs = [epoch for one in series for epoch, _ in one.points]
    if not finite:
        return Markup("")
    x = Scale(min(epochs), max([*epochs, min(epochs) + 1]), _LEFT, WIDTH - _RIGHT)
    y = scale_of(finite, HEIGHT - _BOTTOM, _TOP, log=log)
    return el(
        "svg",
        _axes(x, y),
        [_mark(one, x, y) for one in marks if one.kind != "best"],
        [_line(one, x, y) for one in sorted(series, key=lambda one: not one.stale)],
        [_missing(one, x, unit) for one in series],
        [_mark(one, x, y) for one in marks if one.kind == "best"],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_=f"chart {'log' if log else 'linear'}",
        role="img",
        aria_label=label,
        tabindex="0",
        data_unit=unit,
        data_series=_hover_data(series),
        data_frame=json.dumps([x.low, x.high, x.start, x.end, y.low, y.high, y.start, y.end, int(log)]),
    )


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


def _axes(x: Scale, y: Scale) -> list[Markup]:
    found = []
    for value in ticks(y):
        at = y(value)
        found.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        found.append(el("text", number(value), x=_LEFT - 6, y=at + 3.5, class_="tick end"))
    for epoch in whole_ticks(int(x.low), int(x.high)):
        found.append(el("text", str(epoch), x=x(epoch), y=HEIGHT - 9, class_="tick middle"))
    found.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y.start, y2=y.start, class_="axis"))
    return found


def _line(series: Series, x: Scale, y: Scale) -> Markup:
    parts: list[str] = []
    pen = "M"
    shown = thinned(series.points)
    for epoch, value in shown:
        if not _plottable(value, y.log):
            pen = "M"
            continue
        parts.append(f"{pen}{x(epoch):.1f} {y(value):.1f}")
        pen = "L"
    drawn = [el("path", d="".join(parts), class_=f"line s{series.colour}{' stale' if series.stale else ''}")]
    finite = [one for one in shown if _plottable(one[1], y.log)]
    if len(finite) <= 40 and not series.stale:
        drawn += [
            el("circle", cx=x(epoch), cy=y(value), r=2.1, class_=f"dot s{series.colour}")
            for epoch, value in finite
        ]
    return el("g", drawn)


def _missing(series: Series, x: Scale, unit: str) -> list[Markup]:
    """A cross at the upper edge per value that no line can show, at most a hundred."""
    odd = [(epoch, value) for epoch, value in series.points if not math.isfinite(value)]
    return [
        el(
            "path",
            el("title", f"{series.name}: {number(value)} at {unit} {epoch}"),
            d=f"M{x(epoch) - 3:.1f} {_TOP - 9}l6 6m0 -6l-6 6",
            class_=f"cross s{series.colour}",
        )
        for epoch, value in thinned(odd, 100)[:100]
    ]


def _mark(mark: EpochMarker, x: Scale, y: Scale) -> Markup:
    at = x(mark.epoch)
    if mark.kind == "best":
        place = y(mark.value) if mark.value is not None else y.end
        return el("circle", el("title", mark.text), cx=at, cy=place, r=5.5, class_=f"best s{mark.colour}")
    return el(
        "g",
        el("title", mark.text),
        el("line", x1=at, x2=at, y1=y.end - 4, y2=y.start, class_="stem"),
        el("path", d=_sign(mark.kind, at, y.end - 8), class_="sign"),
        class_=f"mark {mark.kind}",
    )


def _sign(kind: str, x: float, y: float) -> str:
    """Resume points on, a rewind points back, a fallback down."""
    if kind == "resume":
        return f"M{x - 3:.1f} {y - 4:.1f}l7 4l-7 4z"
    if kind == "rewind":
        return f"M{x + 3:.1f} {y - 4:.1f}l-7 4l7 4z"
    return f"M{x - 4:.1f} {y - 3:.1f}l4 7l4 -7z"


def _hover_data(series: Sequence[Series]) -> str:
    said = [
        [
            one.name,
            one.colour,
            int(one.stale),
            [
                [epoch, value if math.isfinite(value) else number(value)]
                for epoch, value in thinned(one.points)
            ],
        ]
        for one in series
    ]
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))
