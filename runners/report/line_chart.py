"""A small line chart as SVG: series over epochs, marks where a later start went on, room for a hover line.

Values that are nan or infinite are no points of a line; they are marked at the upper edge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from torchrelay.records import dataclass
from torchrelay.runners.report.markup import Markup, el
from torchrelay.runners.report.scales import Scale, scale_of, ticks, whole_ticks
from torchrelay.runners.report.wording import number

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
class Mark:
    """Something at an epoch: `kind` is `resume`, `rewind`, `fallback` or `best`."""

    kind: str
    epoch: int
    text: str
    colour: int = 1
    value: float | None = None


def line_chart(
    label: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
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


def _mark(mark: Mark, x: Scale, y: Scale) -> Markup:
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
