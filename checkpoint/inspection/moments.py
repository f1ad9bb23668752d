"""Norm, mean, standard deviation, extremes and NaN/Inf counts of stored tensors, in bounded memory.

    leaf_moments(open_epoch(storage, entry), ["model"])     # one Moments per leaf

Pure kernels below, joined chunk by chunk; squares neither overflow nor vanish, whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

from torchrelay.checkpoint.inspection.contents import Epoch, Item, check_chosen
from torchrelay.checkpoint.inspection.elements import Array, numbers
from torchrelay.checkpoint.inspection.number_types import HAVE_NUMBERS
from torchrelay.checkpoint.inspection.numerics import np
from torchrelay.checkpoint.inspection.tensor_bytes import CHUNK_BYTES, Buffer, parts
from torchrelay.records import dataclass

STEP = 1 << 14
"""So many elements are computed with at a time. Copies of them in double precision take 128 KiB: they stay
in the cache, and larger ones would take fresh pages from the system each time, at five times the cost."""
_SAFE = (1e-140, 1e140)
"""Between these a square is a normal number, and so is the sum of very many."""


@dataclass(frozen=True)
class Moments:
    """Of so many `elements`, `nan` and `inf` of them; everything else is of the finite ones.

    `mean`, `std` (of the population), `minimum` and `maximum` are None where no element is finite, and
    of complex numbers. `norm` is the root of the sum of squares.
    """

    elements: int = 0
    nan: int = 0
    inf: int = 0
    norm: float = 0.0
    mean: float | None = None
    std: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def finite(self) -> int:
        """How many elements are neither NaN nor Inf."""
        return self.elements - self.nan - self.inf

    def json(self) -> dict[str, Any]:
        """As JSON; a number that JSON lacks (a norm beyond all doubles) is text."""
        return {name: finite_json(value) for name, value in vars(self).items()}


def leaf_moments(epoch: Epoch, patterns: str | Sequence[str] = ()) -> dict[str, Moments]:
    """Moments by leaf (`model.weight`, or `trainer_1:total` of what a node has for itself).

    Leaves that match any pattern, or all; left out are values, aliases, types without numbers, and
    leaves whose files retention has removed. Every byte is verified; memory stays below 64 MiB.
    Raises UsageError for a pattern that means nothing, DamagedError or StorageError for what the
    storage has.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    check_chosen([epoch], wanted)
    items = epoch.chosen(wanted).items()
    return {
        name: _of_item(epoch, item)
        for name, item in items
        if item.tensor and item.leaf.dtype in HAVE_NUMBERS and not epoch.gone(item)
    }


def _of_item(epoch: Epoch, item: Item) -> Moments:
    return joined(moments_of(chunk) for chunk in _chunks(epoch, item))


def _chunks(epoch: Epoch, item: Item) -> Iterator[Array]:
    buffer = Buffer()
    for part in parts(epoch, item):
        for start in range(0, part.nbytes, CHUNK_BYTES):
            data = buffer.filled(epoch, part, start, min(start + CHUNK_BYTES, part.nbytes))
            yield from steps(data, item.leaf.item_bytes, str(item.leaf.dtype))


def steps(data: memoryview, item_bytes: int, dtype: str) -> Iterator[Array]:
    """The numbers of bytes, at most `STEP` at a time."""
    for at in range(0, len(data), STEP * item_bytes):
        yield numbers(data[at : at + STEP * item_bytes], dtype)


def moments_of(values: Array) -> Moments:
    """Of a 1-D array of any real or complex type."""
    finite, nan, inf = finite_part(values)
    if not finite.size:
        return Moments(values.size, nan, inf)
    if np.iscomplexobj(finite):
        return Moments(values.size, nan, inf, norm(finite))
    reals, power = safe(as_reals(finite), finite)
    mean = reals.mean()
    from_mean = reals - mean
    return Moments(
        values.size,
        nan,
        inf,
        unscaled(math.sqrt(inner(reals, reals)), power),
        unscaled(mean, power),
        unscaled(math.sqrt(inner(from_mean, from_mean) / reals.size), power),
        float(finite.min()),
        float(finite.max()),
    )


def joined(all_moments: Iterable[Moments]) -> Moments:
    """The moments of all together."""
    return reduce(_both, all_moments, Moments())


def _both(a: Moments, b: Moments) -> Moments:
    counts = (a.elements + b.elements, a.nan + b.nan, a.inf + b.inf)
    total = a.finite + b.finite
    norms = math.hypot(a.norm, b.norm)
    if a.mean is None or b.mean is None:
        one = b if a.mean is None else a
        return Moments(*counts, norms, one.mean, one.std, one.minimum, one.maximum)
    left, right = a.finite / total, b.finite / total
    between = math.sqrt(left) * math.sqrt(right)
    return Moments(
        *counts,
        norms,
        a.mean * left + b.mean * right,
        math.hypot(
            _of(a.std) * math.sqrt(left), _of(b.std) * math.sqrt(right), (a.mean * between - b.mean * between)
        ),
        min(_of(a.minimum), _of(b.minimum)),
        max(_of(a.maximum), _of(b.maximum)),
    )


def finite_part(values: Array) -> tuple[Array, int, int]:
    """The finite elements, and how many are NaN and Inf. A complex number with a NaN in it is NaN."""
    if values.dtype.kind not in "fc":
        return values, 0, 0
    finite = np.isfinite(values)
    if finite.all():
        return values, 0, 0
    nan = int(np.count_nonzero(np.isnan(values)))
    return values[finite], nan, int(values.size - np.count_nonzero(finite)) - nan


def norm(values: Array) -> float:
    """The root of the sum of squares of finite numbers; infinite where no double can hold it."""
    reals, power = safe(as_reals(values), values)
    return unscaled(math.sqrt(inner(reals, reals)), power)


def as_reals(values: Array) -> Array:
    """Double precision; of complex numbers both parts, one behind the other."""
    if np.iscomplexobj(values):
        return np.ascontiguousarray(values, np.complex128).view(np.float64)
    return values.astype(np.float64)


def is_wide(values: Array) -> bool:
    """Whether their squares may be beyond what a double can hold."""
    return values.dtype.itemsize >= (16 if np.iscomplexobj(values) else 8)


def safe(reals: Array, values: Array) -> tuple[Array, int]:
    """`values` as reals, scaled so that squares can be added, and the power of two they were divided by."""
    peak = largest(reals) if is_wide(values) else 0.0
    if peak == 0.0 or _SAFE[0] < peak < _SAFE[1]:
        return reals, 0
    power = math.frexp(peak)[1]
    return np.ldexp(reals, -power), power


def inner(one: Array, other: Array) -> float:
    """The inner product, by this thread alone: BLAS would share it among threads that wait by spinning."""
    return float(np.einsum("i,i->", one, other))


def largest(reals: Array) -> float:
    """The largest absolute value; 0 of nothing."""
    return max(float(reals.max()), -float(reals.min())) if reals.size else 0.0


def unscaled(number: float, power: int) -> float:
    """A figure of scaled numbers as that of the numbers themselves."""
    with np.errstate(over="ignore"):
        return float(np.ldexp(number, power)) if power else float(number)


def finite_json(value: Any) -> Any:
    """A number as JSON can say it."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _of(number: float | None) -> float:
    return 0.0 if number is None else number
