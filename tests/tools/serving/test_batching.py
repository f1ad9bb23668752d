"""Which samples make a batch, and when: with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.errors import UsageError
from torchrelay.runners.programs.request import Budget, RequestLimits
from torchrelay.tools.serving.batching import PendingRequest, Queue
from torchrelay.tools.serving.handlers import Served


class Alike:
    """Samples are alike where their first letters are."""

    def alike(self, sample: str) -> str:
        return sample[0]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(*samples: str, served: Served | None = None) -> PendingRequest:
    return PendingRequest(served or ONE, samples, lambda asked: None)


ONE = Served("one", Alike())  # type: ignore[arg-type]
TWO = Served("two", Alike())  # type: ignore[arg-type]


def queue(**limits: Any) -> tuple[Queue, Clock]:
    clock = Clock()
    return Queue(RequestLimits(**{"max_batch": 3, "max_delay_secs": 1.0, **limits}), clock), clock


def samples(batch: list[Any]) -> list[str]:
    return [item.sample for item in batch]


def test_a_full_batch_goes_at_once_and_the_rest_when_it_is_due():
    """Three that are alike need not wait; the fourth waits its second."""
    line, clock = queue()
    assert line.put(asked("a1", "a2", "a3", "a4"))
    assert samples(line.take()) == ["a1", "a2", "a3"]
    assert len(line) == 1
    clock.now = 1.0
    assert samples(line.take()) == ["a4"]


def test_only_what_is_alike_and_of_one_model_goes_together():
    """Other shapes, and other epochs, are other batches; each comes in its turn."""
    line, clock = queue()
    line.put(asked("a1"))
    line.put(asked("b1"))
    line.put(asked("a2", served=TWO))
    line.put(asked("a3"))
    clock.now = 5.0
    assert [samples(line.take()) for _ in range(3)] == [["a1", "a3"], ["b1"], ["a2"]]


def test_many_of_one_kind_do_not_hold_the_others_up():
    """What is left of a group comes after those that wait."""
    line, clock = queue()
    line.put(asked(*[f"a{n}" for n in range(4)]))
    line.put(asked("b1"))
    clock.now = 5.0
    assert [samples(line.take())[0] for _ in range(3)] == ["a0", "b1", "a3"]


def test_a_request_is_taken_whole_or_not_at_all():
    """A queue of 5 has no room for 3 beside 3; when it is closed it has none at all."""
    line, _ = queue(queue=5)
    assert line.put(asked("a1", "a2", "a3"))
    assert not line.put(asked("b1", "b2", "b3"))
    assert len(line) == 3
    assert len(line.close()) == 1
    assert not line.put(asked("a")) and line.take() == []


def test_what_was_given_up_is_not_computed():
    """Samples of clients that are gone are passed over."""
    line, clock = queue()
    gone = asked("a1", "a2")
    line.put(gone)
    line.put(asked("a3"))
    gone.given_up = True
    clock.now = 5.0
    assert samples(line.take()) == ["a3"] and len(line) == 0


def test_a_budget_has_what_it_has():
    """Bytes are taken whole or not at all, and given back."""
    budget = Budget(10)
    assert budget.take(8) and not budget.take(3) and budget.take(2)
    budget.give_back(8)
    assert budget.take(8)


@pytest.mark.parametrize("limits", [{"depth": 0}, {"secs": -1.0}, {"max_delay_secs": 30.0}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any]):
    """Nothing is unlimited by accident, and no batch waits longer than its request."""
    with pytest.raises(UsageError):
        RequestLimits(**limits)
