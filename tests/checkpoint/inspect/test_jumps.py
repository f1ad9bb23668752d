"""Jumps of metrics, and the search for the first bad one: laws of two pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.inspect.anomalies import FACTOR, LEAST, first_bad, first_jump

WHOLE = st.integers(-1000, 1000).map(float)
ROWS = st.lists(WHOLE, max_size=40)
"""Whole numbers: so sums, differences and products with powers of two are exact."""


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2000), st.data())
def test_the_first_bad_is_found_with_few_questions(count, data):
    """Where all from some place on are bad: found with ceil(log2 n) + 1 questions, the neighbour too."""
    bad_from = data.draw(st.integers(0, count))
    asked = []

    def is_bad(number):
        asked.append(number)
        return number >= bad_from

    found = first_bad(count, is_bad)
    assert found == (bad_from if bad_from < count else None)
    assert len(asked) == len(set(asked)) <= (math.ceil(math.log2(count)) + 1 if count else 0)
    assert not found or found - 1 in asked


@given(st.lists(st.booleans(), max_size=64))
def test_any_answer_is_a_bad_one_behind_a_good_one(bad):
    """Also where what was bad becomes good again, the answer is bad, and what is before it is good."""
    found = first_bad(len(bad), bad.__getitem__)
    if found is None:
        assert not (bad and bad[-1])
    else:
        assert bad[found] and (found == 0 or not bad[found - 1])


def jump(values, factor=FACTOR):
    found = first_jump(values, factor)
    return None if found is None else found.at


@settings(max_examples=200, deadline=None)
@given(ROWS, st.sampled_from([0.25, 2.0, -1.0, -8.0]), st.sampled_from([2.0, 8.0]))
@example([0.0] * 10 + [1.0], 2.0, 8.0)
def test_units_and_signs_do_not_matter(values, scale, factor):
    """A metric in another unit, or upside down, jumps where it did."""
    assert jump(values, factor) == jump([scale * value for value in values], factor)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.floats(1, 50), st.floats(1, 50))
def test_a_larger_factor_finds_no_earlier_jump(values, one, other):
    """What is a jump for a large factor is one for any smaller one."""
    small, large = (jump(values, factor) for factor in sorted((one, other)))
    assert large is None or (small is not None and small <= large)


@settings(max_examples=200, deadline=None)
@given(ROWS, ROWS)
def test_what_comes_later_does_not_matter(values, more):
    """A jump that was found stays the first, whatever is trained after it."""
    found = jump(values)
    assert found is None or jump(values + more) == found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.9, 1.1), min_size=LEAST + 1, max_size=40), st.lists(st.floats(0.9, 1.1), max_size=20)
)
def test_a_spike_in_noise_is_found(before, after):
    """A value a hundred times the level is the first jump, unless the noise itself had one."""
    found = jump([*before, 100.0, *after])
    assert found == (len(before) if jump(before) is None else jump(before))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_metric_that_is_no_number_is_a_jump(at, bad):
    """NaN and Inf are jumps from the first epoch on."""
    assert jump([1.0] * at + [bad, 1.0]) == at


@pytest.mark.parametrize(
    "values",
    [
        [0.5] * 30,
        [2.0 * 0.9**epoch for epoch in range(60)],
        [0.97 + 0.001 * (epoch % 3) for epoch in range(30)],
        [float(epoch) for epoch in range(50)],
        [],
        [1.0, 50.0, -3.0],
    ],
)
def test_ordinary_curves_do_not_jump(values):
    """Constant, falling, noisy, rising and short rows have no jump."""
    assert jump(values) is None


def test_a_loss_that_blows_up_is_found():
    """A falling loss that leaps back up, by less than it began with, jumps where it leaps."""
    values = [2.0 * 0.9**epoch for epoch in range(20)]
    found = first_jump([*values, 1.5, 1.4])
    assert found is not None and found.at == 20
    assert found.change is not None and math.isclose(found.change, 1.5 - values[-1])
