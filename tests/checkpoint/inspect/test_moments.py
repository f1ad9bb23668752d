"""Numbers out of stored bytes: what torch and plain arithmetic say, for every element type."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.inspect.contents import CAN_BE_BAD, HAVE_NUMBERS
from torchrelay.checkpoint.inspect.statistics import (
    Change,
    Moments,
    change_between,
    joined_changes,
    moments_of,
    numbers,
    table,
)
from torchrelay.checkpoint.inspect.statistics import joined as joined_moments

WIDTHS = {name: getattr(torch, name).itemsize for name in sorted(HAVE_NUMBERS)}
FLOAT8 = [name for name in sorted(CAN_BE_BAD) if name.startswith("float8")]


def stored(content: bytes, dtype: str) -> torch.Tensor:
    """A tensor of any bits."""
    whole = content[: len(content) // WIDTHS[dtype] * WIDTHS[dtype]]
    if dtype == "bool":
        whole = bytes(one & 1 for one in whole)
    raw = torch.tensor(list(whole), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype))


def exact(one: torch.Tensor) -> list[list[float]]:
    """The real parts of every element, by torch."""
    if one.is_complex():
        return torch.view_as_real(one.to(torch.complex128)).tolist()
    wide = one if one.dtype in (torch.int64, torch.uint64) else one.to(torch.float64)
    return [[item] for item in wide.tolist()]


def is_finite(item: list[float]) -> bool:
    return all(math.isfinite(part) for part in item)


def root(total: Fraction) -> float:
    """The square root of an exact sum; infinite where no double holds it."""
    if not total:
        return 0.0
    shift = (total.numerator.bit_length() - total.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(total / Fraction(4) ** shift), shift)
    except OverflowError:
        return math.inf


def norm_of(one: torch.Tensor) -> float:
    return root(
        sum((Fraction(part) ** 2 for item in exact(one) if is_finite(item) for part in item), Fraction())
    )


def close(found: float | None, wanted: float, slack: float = 0.0) -> bool:
    assert found is not None
    return found == wanted or math.isclose(found, wanted, rel_tol=1e-9, abs_tol=slack)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_of_a_float8_is_what_torch_says(dtype):
    """The tables that are made by rule are torch's, for all 256 codes, NaN and signs of zero included."""
    wanted = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32).numpy()
    np.testing.assert_array_equal(table(dtype), wanted)
    assert (np.signbit(table(dtype)) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_every_bfloat16_and_float16_is_what_torch_says():
    """All 65,536 codes of the two-byte floats come out as torch reads them."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in ("bfloat16", "float16"):
        one = codes.view(getattr(torch, dtype))
        np.testing.assert_array_equal(
            numbers(memory_of(one), dtype).astype(np.float32), one.to(torch.float32).numpy()
        )


def test_a_type_without_numbers_is_refused():
    """Nobody computes with what is only a pattern of bits."""
    with pytest.raises(ValueError, match="bits8"):
        numbers(memoryview(b"x"), "bits8")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(HAVE_NUMBERS)), st.binary(max_size=192), st.integers(0, 12))
@example("float64", np.array([1e308, -1e308, 1e-320]).tobytes(), 1)
@example("float64", np.array([5e-324, 0.0]).tobytes(), 0)
def test_moments_are_those_of_exact_arithmetic(dtype, content, cut):
    """Any bits of any type, cut into two chunks anywhere: counts exact, norm, mean and deviation to 1e-9."""
    one = stored(content, dtype)
    data, at = memory_of(one), min(cut, one.numel()) * WIDTHS[dtype]
    found = joined_moments(moments_of(numbers(part, dtype)) for part in (data[:at], data[at:]))
    items = exact(one)
    good = [item for item in items if is_finite(item)]
    nan = sum(any(math.isnan(part) for part in item) for item in items)
    assert (found.elements, found.nan, found.inf) == (len(items), nan, len(items) - nan - len(good))
    assert close(found.norm, norm_of(one))
    if one.is_complex() or not good:
        assert found.mean is found.std is found.minimum is found.maximum is None
        return
    flat = [Fraction(item[0]) for item in good]
    mean, largest = sum(flat) / len(flat), float(max(map(abs, flat)))
    assert close(found.mean, float(mean), 1e-12 * largest)
    assert close(found.std, root(sum((item - mean) ** 2 for item in flat) / len(flat)), 1e-12 * largest)
    assert (found.minimum, found.maximum) == (float(min(flat)), float(max(flat)))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(HAVE_NUMBERS)), st.binary(max_size=96), st.binary(max_size=96), st.integers(0, 9)
)
@example("int64", (2**60).to_bytes(8, "little"), (2**60 + 1).to_bytes(8, "little"), 0)
@example("uint64", b"\xff" * 8, b"\0" * 8, 0)
@example("int64", (2**63 - 1).to_bytes(8, "little"), (2**63).to_bytes(8, "little"), 0)
@example("float64", np.array([1.7e308]).tobytes(), np.array([-1.7e308]).tobytes(), 0)
@example("float64", np.array([5e-324]).tobytes(), np.array([1e-323]).tobytes(), 0)
def test_changes_are_those_of_exact_arithmetic(dtype, left, right, cut):
    """Any two tensors of any bits, cut anywhere: what changed, norms, largest change, cosine."""
    size = min(len(left), len(right))
    a, b = stored(left[:size], dtype), stored(right[:size], dtype)
    width = WIDTHS[dtype]
    one, other, at = memory_of(a), memory_of(b), min(cut, a.numel()) * width
    pairs = [(one[:at], other[:at]), (one[at:], other[at:])]
    found = joined_changes(change_between(x, y, width, dtype) for x, y in pairs)
    changed = sum(one[i : i + width] != other[i : i + width] for i in range(0, len(one), width))
    assert (found.compared, found.changed) == (a.numel(), changed)
    both = [(x, y) for x, y in zip(exact(a), exact(b), strict=True) if is_finite(x) and is_finite(y)]
    flat = [(Fraction(p), Fraction(q)) for x, y in both for p, q in zip(x, y, strict=True)]
    apart = [[Fraction(q) - Fraction(p) for p, q in zip(x, y, strict=True)] for x, y in both]
    norms = root(sum((p**2 for p, _ in flat), Fraction())), root(sum((q**2 for _, q in flat), Fraction()))
    assert close(found.norm_a, norm_of(a)) and close(found.norm_b, norm_of(b))
    assert close(found.norm_difference, root(sum((d**2 for item in apart for d in item), Fraction())))
    largest = max((root(sum((d**2 for d in item), Fraction())) for item in apart), default=0.0)
    assert close(found.max_abs, largest)
    if 0.0 in norms:
        assert found.cosine is None
    elif math.inf not in norms:
        dot = sum((p * q for p, q in flat), Fraction())
        cosine = float(dot / Fraction(norms[0]) / Fraction(norms[1]))
        assert close(found.cosine, cosine, 1e-6 if min(norms) < 1e-300 else 1e-9)


def test_zeros_have_no_cosine_and_no_relative_change():
    """Of a tensor of zeros direction and relative size say nothing; the difference still does."""
    zeros, ones = torch.zeros(4), torch.ones(4)
    found = change_between(memory_of(zeros), memory_of(ones), 4, "float32")
    assert (found.cosine, found.relative, found.norm_difference, found.share) == (None, None, 2.0, 1.0)
    none = change_between(memory_of(torch.empty(0)), memory_of(torch.empty(0)), 4, "float32")
    assert none == Change() and none.share == 0.0
    assert joined_moments([]) == Moments()
