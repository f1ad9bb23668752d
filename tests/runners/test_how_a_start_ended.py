"""What is told of a start's end: once, by whoever is first, over no later start's status, heard or not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torchrelay.checkpoint.log.view import LeaseInfo, Look
from torchrelay.jobs.session import Solo
from torchrelay.metadata.run_directory import RunDirectory, State
from torchrelay.runners.distributed.launcher import NOTE_SECS, SECS, final_calls, notes
from torchrelay.runners.monitoring.progress import Progress
from torchrelay.runners.monitoring.text import RankLog
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict
from torchrelay.runners.training.exit import run_and_leave
from torchrelay.runners.training.journal import Journal
from torchrelay.runners.training.plan import Choice

WAIT_SECS = 60.0


class Held(RunDirectory):
    """The status of one state is written only when somebody lets it; tells that it is about to be."""

    held: State | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.about, self.go = threading.Event(), threading.Event()

    def write_status(self, state: State, *, durable: bool = True, **details: Any) -> None:
        """As ever, but for the state that is held."""
        if state == self.held:
            self.about.set()
            assert self.go.wait(WAIT_SECS)
        super().write_status(state, durable=durable, **details)


@pytest.fixture
def run(tmp_path: Path) -> Held:
    return Held(tmp_path)


@pytest.fixture
def journal(run: Held) -> Iterator[Journal]:
    first = started(run, 0)
    yield first
    notes.forget(first.cut_off)


def started(run: RunDirectory, generation: int) -> Journal:
    """The journal of a start that holds the log."""
    made = Journal(run, Solo(), Progress(RankLog(0, 1, "here"), talks=False))
    made.opened(LeaseInfo("job", "uuid", 0, generation), Look(), Choice("fresh"))
    return made


def in_thread(work: Any, *values: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=values, daemon=True)
    thread.start()
    return thread


def failures(run: RunDirectory) -> list[str]:
    return [line["error"] for line in run.events() if line["kind"] == "failure"]


def test_nobody_ends_the_process_while_its_failure_is_being_noted(run: Held, journal: Journal) -> None:
    """A thread that is to end the process waits until the main thread has noted why it failed."""
    run.held = "FAILED"
    main = in_thread(journal.failed, RuntimeError("mine"), RunState(), "mine", 1)
    assert run.about.wait(WAIT_SECS)
    other = in_thread(partial(notes.make, "another's", 6, secs=WAIT_SECS))
    other.join(0.5)
    assert other.is_alive()  # what follows it is the end of the process
    run.go.set()
    for thread in (main, other):
        thread.join(WAIT_SECS)
    assert (run.status()["error"], failures(run)) == ("mine", ["mine"])


def test_a_status_that_was_under_way_does_not_hide_the_failure(run: Held, journal: Journal) -> None:
    """The main thread that comes to an epoch's end meanwhile does not say again that the run goes on."""
    run.held = "RUNNING"
    state = RunState()
    main = in_thread(journal.epoch_done, state, {}, True, StopVerdict())
    assert run.about.wait(WAIT_SECS)
    other = in_thread(partial(notes.make, "lost a peer", 6, secs=WAIT_SECS))
    other.join(0.5)
    run.go.set()
    for thread in (main, other):
        thread.join(WAIT_SECS)
    journal.epoch_done(state, {}, True, StopVerdict())
    assert (run.status()["state"], failures(run)) == ("FAILED", ["lost a peer"])


def test_who_was_frozen_leaves_the_status_of_the_next_start_alone(run: Held, journal: Journal) -> None:
    """A process whose log was taken meanwhile ends, and says so in its own events alone."""
    later = started(run, 1)
    notes.forget(later.cut_off)
    notes.make("its launcher is gone", 6, secs=WAIT_SECS)
    status = run.status()
    assert (status["state"], status["generation"], failures(run)) == ("RUNNING", 1, ["its launcher is gone"])


def test_a_process_without_threads_ends_all_the_same(
    run: Held, journal: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no thread can be made nothing is noted or put up, and the process is ended; an error is told."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    said = threading.Event()
    final_calls.append(said.set)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        notes.make("lost a peer", 6, secs=NOTE_SECS)
        final_calls.make(secs=SECS)
        with pytest.raises(SystemExit):
            run_and_leave(lambda: sys.exit("no room"))
    assert "no room" in capsys.readouterr().err
    final_calls.forget(said.set)
    assert (run.status()["state"], failures(run), said.is_set()) == ("RUNNING", [], False)


FAILS = """
from torchrelay.errors import StorageError
from torchrelay.runners.training.exit import run_and_leave

def work():
    raise StorageError("full")

run_and_leave(work)
"""


def test_the_exit_code_is_right_also_where_nobody_reads_why() -> None:
    """A program whose stderr leads nowhere any more ends with its error's code, not with that of a pipe."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run([sys.executable, "-c", FAILS], stderr=writes, timeout=120, check=False)
    finally:
        os.close(writes)
    assert done.returncode == 5
