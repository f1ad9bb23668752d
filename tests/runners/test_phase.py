"""What a process says that it is doing, read from outside."""

from __future__ import annotations

import threading
from pathlib import Path

from torchrelay.jobs.runtime import ProcessPhases, stack_of_main_thread


def read(place: str) -> str:
    return Path(place).read_bytes().rstrip(b"\0").decode()


def test_phases_are_nested_and_of_every_thread():
    """The outer phase comes back when the inner one ends; threads do not hide each other."""
    phase = ProcessPhases()
    place = phase.show()
    with phase.during("epoch 3"):
        with phase.during("waiting at 'save'"):
            assert read(place) == phase.text() == "epoch 3, waiting at 'save'"
            other = threading.Thread(target=lambda: seen.append(_inside(phase, place)))
            seen: list[str] = []
            other.start()
            other.join(60)
            assert seen == ["epoch 3, waiting at 'save'; copying"]
        assert read(place) == "epoch 3"
    assert read(place) == "nothing that it reported"


def _inside(phase: ProcessPhases, place: str) -> str:
    with phase.during("copying"):
        return read(place)


def test_a_phase_that_is_too_long_is_cut():
    """Text of users does not overflow the memory, not even in the middle of a character."""
    phase = ProcessPhases()
    place = phase.show()
    with phase.during("ä" * 2000):
        assert 500 <= len(Path(place).read_bytes().rstrip(b"\0")) < 512


def test_the_main_threads_stack_names_files_and_lines():
    """Innermost first, a bounded number of calls, from any thread."""
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(stack_of_main_thread()))
    thread.start()
    thread.join(60)
    assert "test_phase.py" in seen[0] and "test_the_main_threads_stack_names_files_and_lines" in seen[0]
    assert stack_of_main_thread().count(" < ") == 7
