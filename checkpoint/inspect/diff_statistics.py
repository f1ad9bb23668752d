"""By how much one tensor differs from another: pure kernels over chunks of both, joined as they come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

from torchrelay.checkpoint.inspect.statistics import (
    STEP,
    Array,
    as_reals,
    finite_json,
    finite_part,
    inner,
    is_wide,
    largest,
    norm,
    np,
    numbers,
    safe,
    unscaled,
)
from torchrelay.records import dataclass

_LARGE = 1e307
_INTERNAL = ("paired_a", "paired_b", "along")


@dataclass(frozen=True)
class Change:
    """Of `compared` pairs of elements, `changed` differ in their bits.

    NaN and Inf are counted on both sides, each norm is of the finite elements of its side. Difference,
    cosine and the largest change are of the pairs that are finite on both, `paired_a` and `paired_b`
    their norms; `along` is the cosine, 0.0 where one of these is 0.
    """

    compared: int = 0
    changed: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_difference: float = 0.0
    max_abs: float = 0.0
    paired_a: float = 0.0
    paired_b: float = 0.0
    along: float = 0.0

    @property
    def share(self) -> float:
        """Of the compared elements, those that changed."""
        return self.changed / self.compared if self.compared else 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the difference by that of the first; None where the first is all zeros."""
        return self.norm_difference / self.paired_a if self.paired_a else None

    @property
    def cosine(self) -> float | None:
        """Between the two as vectors, from -1 to 1; None where one is all zeros."""
        return self.along if self.paired_a and self.paired_b else None

    def json(self) -> dict[str, Any]:
        """As JSON; a number that JSON lacks is text."""
        said = {name: value for name, value in vars(self).items() if name not in _INTERNAL}
        said |= {"share": self.share, "relative": self.relative, "cosine": self.cosine}
        return {name: finite_json(value) for name, value in said.items()}


def change_between(a: memoryview, b: memoryview, item_bytes: int, dtype: str) -> Change:
    """Of stored bytes of one type and length, element by element."""
    step = STEP * item_bytes
    chunks = ((a[at : at + step], b[at : at + step]) for at in range(0, len(a), step))
    return joined(_of_bytes(one, other, item_bytes, dtype) for one, other in chunks)


def joined(changes: Iterable[Change]) -> Change:
    """The change of all together."""
    return reduce(_both, changes, Change())


def _both(one: Change, other: Change) -> Change:
    paired_a = math.hypot(one.paired_a, other.paired_a)
    paired_b = math.hypot(one.paired_b, other.paired_b)
    weights = (_share(part.paired_a, paired_a) * _share(part.paired_b, paired_b) for part in (one, other))
    return Change(
        one.compared + other.compared,
        one.changed + other.changed,
        one.nan_a + other.nan_a,
        one.nan_b + other.nan_b,
        one.inf_a + other.inf_a,
        one.inf_b + other.inf_b,
        math.hypot(one.norm_a, other.norm_a),
        math.hypot(one.norm_b, other.norm_b),
        math.hypot(one.norm_difference, other.norm_difference),
        max(one.max_abs, other.max_abs),
        paired_a,
        paired_b,
        sum(part.along * weight for part, weight in zip((one, other), weights, strict=True)),
    )


def _share(part: float, whole: float) -> float:
    if math.isinf(whole):
        return float(math.isinf(part))
    return part / whole if whole else 0.0


def _of_bytes(a: memoryview, b: memoryview, item_bytes: int, dtype: str) -> Change:
    one, other = numbers(a, dtype), numbers(b, dtype)
    changed = changed_elements(a, b, item_bytes)
    first, nan_a, inf_a = finite_part(one)
    second, nan_b, inf_b = finite_part(other)
    counts = (one.size, changed, nan_a, nan_b, inf_a, inf_b)
    if not (nan_a or inf_a or nan_b or inf_b):
        return Change(*counts, *_figures(first, second))
    both = np.isfinite(one) & np.isfinite(other)
    return Change(*counts, norm(first), norm(second), *_figures(one[both], other[both])[2:])


def changed_elements(a: memoryview, b: memoryview, item_bytes: int) -> int:
    """How many elements differ in their bits."""
    words = next(size for size in (8, 4, 2, 1) if item_bytes % size == 0)
    differ = np.frombuffer(a, f"<u{words}") != np.frombuffer(b, f"<u{words}")
    if words < item_bytes:
        differ = differ.reshape(-1, item_bytes // words).any(axis=1)
    return int(np.count_nonzero(differ))


def _figures(a: Array, b: Array) -> tuple[float, ...]:
    """Both norms, that of the difference, its largest element, both norms again, and the cosine."""
    if not a.size:
        return (0.0,) * 7
    one, other = as_reals(a), as_reals(b)
    (left, power_a), (right, power_b) = safe(one, a), safe(other, b)
    norm_a, norm_b = math.sqrt(inner(left, left)), math.sqrt(inner(right, right))
    along = inner(left, right) / (norm_a * norm_b) if norm_a and norm_b else 0.0
    apart, power = _difference(a, b, one, other)
    distance, more = safe(apart, a)
    norms = (unscaled(norm_a, power_a), unscaled(norm_b, power_b))
    size = unscaled(math.sqrt(inner(distance, distance)), power + more)
    return (*norms, size, unscaled(_largest(apart, a), power), *norms, min(1.0, max(-1.0, along)))


def _difference(a: Array, b: Array, one: Array, other: Array) -> tuple[Array, int]:
    """The difference of `one` and `other`, which are a and b as reals.

    It is divided by a power of two where a double could not hold it.
    """
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        return _whole_difference(a, b), 0
    if is_wide(a) and max(largest(one), largest(other)) > _LARGE:
        return other / 4 - one / 4, 2
    return other - one, 0


def _largest(apart: Array, a: Array) -> float:
    """The largest absolute value of differences of numbers like `a`."""
    return float(np.abs(apart.view(np.complex128)).max()) if np.iscomplexobj(a) else largest(apart)


def _whole_difference(a: Array, b: Array) -> Array:
    """Sizes of differences of 64-bit integers, exact before they are rounded to double precision."""
    one, other = a.view(np.uint64), b.view(np.uint64)
    return np.where(a > b, one - other, other - one).astype(np.float64)
