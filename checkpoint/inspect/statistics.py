"""Compute statistics of stored tensors in bounded memory, and by how much two tensors differ.

    joined(moments_of(chunk) for chunk in steps(data, item_bytes, dtype))  # one Moments for all bytes

numpy is an optional dependency, imported only when numbers are requested; nothing that trains, saves or loads
needs it. bfloat16 is the upper half of a float32; the float8 types are looked up in tables of 256 values.
Types of less than a byte, `bits*` and `float4_e2m1fn_x2` have no numbers here: they are compared by their
bytes.

The kernels below are pure and joined chunk by chunk; squares neither overflow nor underflow for any numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache, reduce
from typing import Any

from torchrelay.checkpoint.format.mesh_geometry import Bounds, whole
from torchrelay.checkpoint.inspect.contents import LeafPart, PartReader
from torchrelay.checkpoint.load.reads.boxes import Copy
from torchrelay.errors import UsageError, install_command
from torchrelay.records import dataclass

try:
    import numpy as np
except ImportError as error:
    raise UsageError(
        f"statistics of tensors need numpy, which is not installed: {install_command('inspect')}"
    ) from error


Array = np.ndarray[Any, np.dtype[Any]]

_PLAIN = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "uint64": "<u8", "int32": "<i4",
    "uint32": "<u4", "int16": "<i2", "uint16": "<u2", "int8": "i1", "uint8": "u1", "bool": "u1",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
_EXPONENTS = {
    # bits of the exponent, bits of the fraction, bias
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}


def numbers(data: memoryview, dtype: str) -> Array:
    """Little-endian bytes as an array, copied only if numpy lacks the type; ValueError without numbers."""
    if dtype in _PLAIN:
        return np.frombuffer(data, _PLAIN[dtype])
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "complex32":
        return np.frombuffer(data, "<f2").astype(np.float32).view(np.complex64)
    if dtype == "float8_e8m0fnu" or dtype in _EXPONENTS:
        return table(dtype)[np.frombuffer(data, np.uint8)]
    raise ValueError(f"{dtype} has no numbers")


@cache
def table(dtype: str) -> Array:
    """The values of the 256 codes of a float8 type."""
    if dtype == "float8_e8m0fnu":
        found = [2.0 ** (code - 127) for code in range(255)] + [np.nan]
    else:
        found = [_decoded(code, dtype) for code in range(256)]
    return np.array(found, np.float32)


def _decoded(code: int, dtype: str) -> float:
    exponent_bits, fraction_bits, bias = _EXPONENTS[dtype]
    exponent = code >> fraction_bits & (1 << exponent_bits) - 1
    fraction = code & (1 << fraction_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if dtype.endswith("fnuz"):
        if code == 0x80:  # the place of a negative zero
            return np.nan
    elif dtype.endswith("fn"):
        if code & 0x7F == 0x7F:
            return np.nan
    elif exponent == (1 << exponent_bits) - 1:
        return np.nan if fraction else sign * np.inf
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias - fraction_bits))
    return float(sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))


STEP = 1 << 14
"""Number of elements per step: double precision copies take 128 KiB and stay in the cache."""
_SAFE = (1e-140, 1e140)
"""Between these a square is a normal number, and so is the sum of very many."""


@dataclass(frozen=True)
class Moments:
    """Statistics of `elements` numbers, with `nan` and `inf` of them; all other figures use the finite ones.

    `mean`, `std` (of the population), `minimum` and `maximum` are None without finite elements, and for
    complex numbers. `norm` is the root of the sum of squares.
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
        """Number of elements that are neither NaN nor Inf."""
        return self.elements - self.nan - self.inf

    def json(self) -> dict[str, Any]:
        """As JSON; a number that JSON lacks (a norm beyond all doubles) is text."""
        return {name: finite_json(value) for name, value in vars(self).items()}


def steps(data: memoryview, item_bytes: int, dtype: str) -> Iterator[Array]:
    """The numbers of bytes, at most `STEP` at a time."""
    for at in range(0, len(data), STEP * item_bytes):
        yield numbers(data[at : at + STEP * item_bytes], dtype)


def moments_of(values: Array) -> Moments:
    """Moments of a 1-D array of any real or complex type."""
    finite, nan, inf = finite_part(values)
    if not finite.size:
        return Moments(values.size, nan, inf)
    if np.iscomplexobj(finite):
        return Moments(values.size, nan, inf, norm(finite))
    reals, power = safe(as_reals(finite), finite)
    mean = reals.mean()
    from_mean = reals - mean
    size = unscaled(math.sqrt(inner(reals, reals)), power)
    std = unscaled(math.sqrt(inner(from_mean, from_mean) / reals.size), power)
    ends = float(finite.min()), float(finite.max())
    return Moments(values.size, nan, inf, size, unscaled(mean, power), std, *ends)


def joined(all_moments: Iterable[Moments]) -> Moments:
    """Moments of all together."""
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
    apart = a.mean * between - b.mean * between
    std = math.hypot((a.std or 0.0) * math.sqrt(left), (b.std or 0.0) * math.sqrt(right), apart)
    ends = min(a.minimum or 0.0, b.minimum or 0.0), max(a.maximum or 0.0, b.maximum or 0.0)
    return Moments(*counts, norms, a.mean * left + b.mean * right, std, *ends)


def finite_part(values: Array) -> tuple[Array, int, int]:
    """The finite elements, and the numbers of NaN and Inf. A complex number with a NaN in it is NaN."""
    if values.dtype.kind not in "fc":
        return values, 0, 0
    finite = np.isfinite(values)
    if finite.all():
        return values, 0, 0
    nan = int(np.count_nonzero(np.isnan(values)))
    return values[finite], nan, int(values.size - np.count_nonzero(finite)) - nan


def norm(values: Array) -> float:
    """The root of the sum of squares of finite numbers; infinite if no double can hold it."""
    reals, power = safe(as_reals(values), values)
    return unscaled(math.sqrt(inner(reals, reals)), power)


def bad_in(values: Array, *, nan_only: bool) -> tuple[int, int, int | None]:
    """Numbers of NaN and Inf in an array (no Inf with `nan_only`), and the index of the first."""
    if not nan_only and np.isfinite(values).all():
        return 0, 0, None
    nans = np.isnan(values)
    bad = nans if nan_only else ~np.isfinite(values)
    count, nan = int(np.count_nonzero(bad)), int(np.count_nonzero(nans))
    return nan, count - nan, int(bad.argmax()) if count else None


def as_reals(values: Array) -> Array:
    """Double precision; of complex numbers both parts, one after the other."""
    if np.iscomplexobj(values):
        return np.ascontiguousarray(values, np.complex128).view(np.float64)
    return values.astype(np.float64)


def is_wide(values: Array) -> bool:
    """Whether their squares may exceed a double."""
    return values.dtype.itemsize >= (16 if np.iscomplexobj(values) else 8)


def safe(reals: Array, values: Array) -> tuple[Array, int]:
    """`values` as reals, scaled so that squares can be added, and the power of two of the scale."""
    peak = largest(reals) if is_wide(values) else 0.0
    if peak == 0.0 or _SAFE[0] < peak < _SAFE[1]:
        return reals, 0
    power = math.frexp(peak)[1]
    return np.ldexp(reals, -power), power


def inner(one: Array, other: Array) -> float:
    """The inner product in this thread only: BLAS would use threads that wait by spinning."""
    return float(np.einsum("i,i->", one, other))


def largest(reals: Array) -> float:
    """The largest absolute value; 0 for an empty array."""
    return max(float(reals.max()), -float(reals.min())) if reals.size else 0.0


def unscaled(number: float, power: int) -> float:
    """A statistic of scaled numbers converted to the original scale."""
    with np.errstate(over="ignore"):
        return float(np.ldexp(number, power)) if power else float(number)


def finite_json(value: Any) -> Any:
    """A number in a form that JSON has."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def small_boxes(part: LeafPart, source: Bounds, first: int, box: Bounds) -> list[Bounds]:
    """The box cut so that each can be read from the part with one range of a few MiB."""
    return [slab.box for slab in _copy(source, first, box).slabs(part.item_bytes)]


def gathered(reader: PartReader, part: LeafPart, source: Bounds, first: int, box: Bounds) -> memoryview:
    """The bytes of a box of which `source`, from element `first` of the part on, holds all elements."""
    words = next(size for size in (8, 4, 2, 1) if part.item_bytes % size == 0)
    many = part.item_bytes // words
    copy = _copy(source, first, box)
    out = np.empty((*copy.shape, many), f"<u{words}")
    extents = [stop - start for start, stop in source]
    strides = [part.item_bytes * math.prod(extents[dim + 1 :]) for dim in range(len(extents))]
    for slab in copy.slabs(part.item_bytes):
        data = np.frombuffer(reader.filled(part, *slab.span), f"<u{words}")
        size = [high - low for low, high in slab.box]
        stored = np.lib.stride_tricks.as_strided(data, [*size, many], [*strides, words], writeable=False)
        place = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(slab.box, box, strict=True))
        out[place] = stored
    return out.reshape(-1).view(np.uint8).data


def _copy(source: Bounds, first: int, box: Bounds) -> Copy:
    """The copy of a box into memory of its shape."""
    extents = tuple(stop - start for start, stop in box)
    return Copy(source, first, box, whole(extents), extents)


_LARGE = 1e307
_INTERNAL = ("paired_a", "paired_b", "along")
_COUNTS = ("compared", "changed", "nan_a", "nan_b", "inf_a", "inf_b")
_NORMS = ("norm_a", "norm_b", "norm_difference", "paired_a", "paired_b")


@dataclass(frozen=True)
class Change:
    """Of `compared` pairs of elements, `changed` differ in their bits.

    NaN and Inf are counted on both sides; each norm uses the finite elements of its side. Difference, cosine
    and the largest change are of the pairs that are finite on both, `paired_a` and `paired_b` their norms;
    `along` is the cosine, 0.0 if one of these is 0.
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
        """Fraction of the compared elements that changed."""
        return self.changed / self.compared if self.compared else 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the difference divided by that of the first; None if the first is all zeros."""
        return self.norm_difference / self.paired_a if self.paired_a else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the two as vectors, from -1 to 1; None if one is all zeros."""
        return self.along if self.paired_a and self.paired_b else None

    def json(self) -> dict[str, Any]:
        """As JSON; a number that JSON lacks is text."""
        said = {name: value for name, value in vars(self).items() if name not in _INTERNAL}
        said |= {"share": self.share, "relative": self.relative, "cosine": self.cosine}
        return {name: finite_json(value) for name, value in said.items()}


def change_between(a: memoryview, b: memoryview, item_bytes: int, dtype: str) -> Change:
    """Change between stored bytes of one type and length."""
    step = STEP * item_bytes
    chunks = ((a[at : at + step], b[at : at + step]) for at in range(0, len(a), step))
    return joined_changes(_of_bytes(one, other, item_bytes, dtype) for one, other in chunks)


def joined_changes(changes: Iterable[Change]) -> Change:
    """The change of all together."""
    return reduce(_both_changes, changes, Change())


def _both_changes(one: Change, other: Change) -> Change:
    first, second = vars(one), vars(other)
    counts: dict[str, Any] = {name: first[name] + second[name] for name in _COUNTS}
    norms: dict[str, Any] = {name: math.hypot(first[name], second[name]) for name in _NORMS}
    a, b = norms["paired_a"], norms["paired_b"]
    along = sum(of.along * (_share(of.paired_a, a) * _share(of.paired_b, b)) for of in (one, other))
    return Change(**counts, **norms, max_abs=max(one.max_abs, other.max_abs), along=along)


def _share(part: float, whole: float) -> float:
    """`part` / `whole`; 0 if `whole` is 0; 0 or 1 if it is infinite."""
    if math.isinf(whole):
        return float(math.isinf(part))
    return part / whole if whole else 0.0


def _of_bytes(a: memoryview, b: memoryview, item_bytes: int, dtype: str) -> Change:
    """The change between chunks of stored bytes."""
    one, other = numbers(a, dtype), numbers(b, dtype)
    words = next(size for size in (8, 4, 2, 1) if item_bytes % size == 0)
    differ = np.frombuffer(a, f"<u{words}") != np.frombuffer(b, f"<u{words}")
    changed = differ.reshape(-1, item_bytes // words).any(axis=1) if words < item_bytes else differ
    first, nan_a, inf_a = finite_part(one)
    second, nan_b, inf_b = finite_part(other)
    counts = (one.size, int(np.count_nonzero(changed)), nan_a, nan_b, inf_a, inf_b)
    if not (nan_a or inf_a or nan_b or inf_b):
        return Change(*counts, *_figures(first, second))
    both = np.isfinite(one) & np.isfinite(other)
    return Change(*counts, norm(first), norm(second), *_figures(one[both], other[both])[2:])


def _figures(a: Array, b: Array) -> tuple[float, ...]:
    """Both norms, that of the difference, its largest element, both norms of the pairs, and the cosine."""
    if not a.size:
        return (0.0,) * 7
    one, other = as_reals(a), as_reals(b)
    (left, power_a), (right, power_b) = safe(one, a), safe(other, b)
    norm_a, norm_b = math.sqrt(inner(left, left)), math.sqrt(inner(right, right))
    along = inner(left, right) / (norm_a * norm_b) if norm_a and norm_b else 0.0
    # The difference of reals of a and b, and the power of two by which it is divided.
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        first, second = a.view(np.uint64), b.view(np.uint64)  # exact before they are rounded
        apart, power = np.where(a > b, first - second, second - first).astype(np.float64), 0
    elif is_wide(a) and max(largest(one), largest(other)) > _LARGE:
        apart, power = other / 4 - one / 4, 2
    else:
        apart, power = other - one, 0
    distance, more = safe(apart, a)
    norms = (unscaled(norm_a, power_a), unscaled(norm_b, power_b))
    size = unscaled(math.sqrt(inner(distance, distance)), power + more)
    most = float(np.abs(apart.view(np.complex128)).max()) if np.iscomplexobj(a) else largest(apart)
    return (*norms, size, unscaled(most, power), *norms, min(1.0, max(-1.0, along)))
