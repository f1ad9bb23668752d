"""From values to places on a chart, and the round numbers written beside it. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from torchrelay.records import dataclass

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
