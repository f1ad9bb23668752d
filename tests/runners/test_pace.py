"""Rate, time to the end and their words are arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.runners.monitoring.text import Moment, duration, eta_secs, per_second, rate, steps_left


def test_a_rate_is_that_of_the_last_seconds() -> None:
    """What lies further back does not count; one moment, or nothing done, tells no rate."""
    slow_then_quick = [Moment(0, 0), Moment(50, 5), Moment(100, 10), Moment(110, 110)]
    assert rate(slow_then_quick, 10, 110) == pytest.approx(10)
    assert rate(slow_then_quick, 1000, 110) == pytest.approx(1)
    assert rate([], 10, 10) is None and rate([Moment(3, 3)], 10, 10) is None
    assert rate([Moment(0, 5), Moment(9, 5)], 10, 10) is None


def test_what_takes_longer_than_the_interval_has_its_own_rate() -> None:
    """An epoch of ten minutes is not one in the last 30 seconds; what stands still gets slower."""
    epochs = [Moment(0, 0), Moment(600, 1), Moment(1200, 2)]
    assert rate(epochs, 30, 1200) == pytest.approx(1 / 600)
    assert rate(epochs, 30, 1700) == pytest.approx(1 / 600)
    assert rate(epochs, 30, 600 + 4000) == pytest.approx(2 / 4000)


@given(per_sec=st.floats(0.001, 1e6), count=st.integers(2, 50), over=st.floats(1, 100))
def test_an_even_pace_is_its_rate(per_sec: float, count: int, over: float) -> None:
    """At an even pace the rate is that pace, over whatever time it is taken."""
    moments = [Moment(float(second), second * per_sec) for second in range(count)]
    assert rate(moments, over, moments[-1].secs) == pytest.approx(per_sec)


def test_what_is_left() -> None:
    """Epochs to come are taken to be as long as this one; the nearer limit counts; without any: unknown."""
    assert steps_left(3, 1200, 3900, 5, 9000, None) == 2700 + 2 * 3900
    assert steps_left(3, 1200, 3900, 5, 9000, 9100) == 100
    assert steps_left(3, 1200, None, 5, 9000, None) is None
    assert steps_left(3, 1200, 3900, None, 9000, None) is None
    assert steps_left(5, 3900, 3900, 5, 19500, None) == 0


def test_the_time_to_the_end() -> None:
    """Work at its rate, but no longer than a limit on time leaves; unknown where neither tells."""
    assert eta_secs(100, 4.0) == 25
    assert eta_secs(100, 4.0, 10) == 10 and eta_secs(None, 4.0, 10) == 10
    assert eta_secs(100, None) is None and eta_secs(None, 4.0) is None
    assert eta_secs(0, None) == 0


def test_durations_and_rates_in_words() -> None:
    """Whole seconds, rounded up; days before the hours; slow rates are told the other way round."""
    assert [duration(secs) for secs in (0, 0.2, 753, 86400 + 61)] == [
        *("00:00:00", "00:00:01", "00:12:33", "1-00:01:01"),
    ]
    assert per_second(41.23, "steps") == "41.2 steps/s" and per_second(0.08, "steps") == "12.5 s/step"
