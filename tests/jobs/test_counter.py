"""Counters."""

import threading

import pytest

from torchrelay.errors import UsageError
from torchrelay.jobs.task import Counter


def test_s9_counting_down_up_and_resetting():
    """Counting down is done once the value was not above 0, and always decrements."""
    counter = Counter(1)
    assert counter.count_down() is False
    assert counter.count_down() is True
    assert counter.value == -1
    assert counter.count_up() == -1
    assert counter.value == 0
    assert counter.reset(5) == 0
    assert counter.reset() == 5
    assert counter.value == 1


def test_s9_a_saved_counter_comes_back():
    """Saved at 22, counted down ten times to 12, loaded back: 22."""
    counter = Counter(22)
    saved = counter.state_dict()
    for _ in range(10):
        counter.count_down()
    assert counter.value == 12
    counter.load_state_dict(saved)
    assert counter.value == 22


@pytest.mark.parametrize("start", [-1, 1.5, "1", True, None])
def test_a_counter_starts_at_an_integer_from_0(start):
    """Negative and other starts are refused."""
    with pytest.raises(UsageError, match="start of a counter"):
        Counter(start)


def test_threads_lose_no_count():
    """Of n count-downs by many threads exactly the start many say "not yet"."""
    counter, answers = Counter(1000), []

    def run():
        answers.extend(counter.count_down() for _ in range(500))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers.count(False) == 1000
    assert counter.value == -1000
