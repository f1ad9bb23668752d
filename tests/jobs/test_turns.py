"""Threads behind the training begin when a boundary is over, and in any case soon."""

from __future__ import annotations

import threading
import time

import pytest

from torchrelay.jobs import runtime


def _begun() -> threading.Event:
    """Set by a thread behind the training when it begins."""
    begun = threading.Event()

    def work() -> None:
        runtime.wait_for_turn()
        begun.set()

    threading.Thread(target=work, daemon=True).start()
    return begun


def test_a_thread_begins_at_once_where_no_boundary_is() -> None:
    """Outside of a boundary nothing is held back."""
    assert _begun().wait(10)


def test_a_thread_begins_when_the_next_task_does(monkeypatch) -> None:
    """Between a boundary and the first task of the next epoch nothing begins, either."""
    monkeypatch.setattr(runtime, "MOST_SECS", 30.0)
    with runtime.undivided(beyond=True):
        begun = _begun()
        assert not begun.wait(0.2)
    assert not begun.wait(0.2)
    runtime.begin_now()
    assert begun.wait(10)


@pytest.mark.parametrize("beyond", [False, True])
def test_a_thread_begins_when_the_boundary_is_over(monkeypatch, beyond: bool) -> None:
    """An error ends the boundary, too: no task follows it."""
    monkeypatch.setattr(runtime, "MOST_SECS", 30.0)
    held: list[threading.Event] = []
    with pytest.raises(ValueError), runtime.undivided(beyond=beyond):
        held.append(_begun())
        assert not held[0].wait(0.2)
        raise ValueError
    assert held[0].wait(10)


def test_who_waits_for_a_thread_lets_it_begin(monkeypatch) -> None:
    """Whoever waits inside of a boundary says so, and does not wait for its end."""
    monkeypatch.setattr(runtime, "MOST_SECS", 30.0)
    with runtime.undivided():
        with runtime.waiting():
            assert _begun().wait(10)
        assert not _begun().wait(0.2), "the rest of the boundary is undivided again"


def test_who_waits_behind_the_training_holds_nobody_up_in_the_next_epoch(monkeypatch) -> None:
    """A thread that waited over the end of a boundary leaves what that made of it."""
    monkeypatch.setattr(runtime, "MOST_SECS", 30.0)
    with runtime.undivided(beyond=True):
        waits = runtime.waiting()
        waits.__enter__()
    runtime.begin_now()
    waits.__exit__(None, None, None)
    assert _begun().wait(10)


def test_no_thread_is_held_for_long() -> None:
    """A boundary that takes long, or never ends, holds nobody for more than a moment."""
    begin = time.monotonic()
    with runtime.undivided():
        assert _begun().wait(10)
    assert time.monotonic() - begin < 10
