"""The thread that saves behind the training is there before a boundary, and does not outlive its use."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchrelay.checkpoint.save.background import SAVES, STANDS_BY
from torchrelay.jobs.runtime import Worker

SECS = 30.0


@pytest.fixture
def one() -> Iterator[Worker]:
    made = Worker(SAVES, STANDS_BY)
    yield made
    made.stop()


def waiting_for(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        event.wait(SECS)

    return wait


def thread_of(one: Worker) -> threading.Thread:
    assert one._thread is not None
    return one._thread


def test_works_are_done_in_order_by_one_thread(one: Worker) -> None:
    """No thread is started for a work; it says by its name whether it does one."""
    assert one.ready()
    thread, seen = thread_of(one), list[tuple[int, threading.Thread, str]]()
    assert thread.name == STANDS_BY
    for number in range(50):
        over = one.submit(
            lambda number=number: seen.append((number, threading.current_thread(), thread.name))
        )
        assert over is not None
        one.wait(over)
        assert thread.name == STANDS_BY
    assert seen == [(number, thread, SAVES) for number in range(50)]


def test_it_has_its_name_as_soon_as_work_is_handed_over(one: Worker) -> None:
    """Whoever looks then sees that a save is on its way, also before the thread has a core."""
    go_on = threading.Event()
    over = one.submit(waiting_for(go_on))
    assert over is not None and thread_of(one).name == SAVES
    go_on.set()
    one.wait(over)


def test_what_was_handed_over_is_done_before_it_is_dismissed(one: Worker) -> None:
    """And for more there is another thread."""
    done: list[int] = []
    one.submit(lambda: done.append(1))
    thread = thread_of(one)
    one.stop()
    assert done == [1] and not thread.is_alive()
    over = one.submit(lambda: done.append(2))
    assert over is not None
    one.wait(over)
    assert done == [1, 2] and thread_of(one) is not thread


def test_it_does_not_outlive_who_made_it() -> None:
    """A manager that nobody closed leaves no thread behind."""
    one = Worker(SAVES, STANDS_BY)
    assert one.ready()
    thread = thread_of(one)
    del one
    gc.collect()
    thread.join(SECS)
    assert not thread.is_alive()


def test_nobody_waits_for_a_thread_that_is_not_there(one: Worker) -> None:
    """A process that was forked off in the midst of a save has none of its threads."""
    held = threading.Event()
    over = one.submit(waiting_for(held))
    assert over is not None
    child = os.fork()
    if child == 0:
        one.wait(over)
        os._exit(0 if not one.alive else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        held.set()


def test_without_threads_it_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then whoever asks does the work."""

    def refuse(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    one = Worker(SAVES, STANDS_BY)
    assert not one.ready() and one.submit(lambda: None) is None
