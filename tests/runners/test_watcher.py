"""The watcher's rules, with threads as ranks and short patience."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from ranks import local_store

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import phase
from torchrelay.runners.distributed.failure_watcher import Watcher, WatcherTimeouts, patience_of
from torchrelay.runners.distributed.launcher import Failure
from torchrelay.runners.distributed.liveness import LifeLines, own_process

FAST = WatcherTimeouts(look=0.05, silence=60, own_grace=0.3, peer_grace=0.1, blame=0.2, shown=0.3)
HASTY = replace(FAST, silence=2)
"""Only for a store that is lost: one that answers late on a busy machine must not count as such."""


class Ended(threading.Event):
    """Stands for the end of a process and keeps its exit code."""

    code: int | None = None

    def __call__(self, code):
        self.code = self.code if self.is_set() else code
        self.set()


@pytest.fixture
def sleeper():
    """A process of this machine that lives until the test ends it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def store():
    return local_store()


def watch(store, rank, processes, patience=FAST, **options):
    ended = Ended()
    return Watcher(store, rank, processes, patience=patience, end=ended, **options).start(), ended


def apart(rank):
    """A process of a host of its own, which the kernel here cannot tell of."""
    return replace(own_process(rank), host=f"host{rank}", group=f"host{rank}")


def test_the_first_failure_ends_all_ranks_with_its_code(store, capfd):
    """Of two failures the first is printed by every rank and gives the code."""
    processes = [apart(rank) for rank in range(3)]
    watched = [watch(store, rank, processes) for rank in range(3)]
    watched[1][0].report_failure("group epoch", "ValueError: bad", 1)
    watched[2][0].report_failure("group epoch", "RuntimeError: later", 6)
    for watcher, ended in watched:
        assert ended.wait(60) and ended.code == 1
        assert watcher.failure.rank == 1
    printed = capfd.readouterr().err
    assert printed.count("rank 1 on host1 failed in group epoch: ValueError: bad") == 3
    assert "later" not in printed
    for watcher, _ in watched:
        watcher.stop()


def test_a_consequence_waits_for_its_cause(store):
    """A broken connection is not reported as the failure when its cause comes within a moment."""
    processes = [apart(rank) for rank in range(2)]
    patient = replace(FAST, blame=60)
    (zero, _), (one, _) = (watch(store, rank, processes, patient) for rank in range(2))
    threading.Timer(0.05, one.report_failure, ("epoch", "ValueError: cause", 1)).start()
    first = zero.report_failure("epoch", "RuntimeError: Connection closed by peer", 6, consequence=True)
    assert first is not None and first.rank == 1 and first.exit_code == 1
    zero.stop(), one.stop()


def test_a_process_that_ends_without_a_word_is_a_failure(store, sleeper):
    """The end of a neighbour is heard from the kernel and named with its pid."""
    processes = [own_process(0), replace(own_process(1), pid=sleeper.pid)]
    watcher, ended = watch(store, 0, processes)
    sleeper.kill()
    assert ended.wait(60) and ended.code == 6
    assert f"rank 1 (pid {sleeper.pid}" in watcher.failure.traceback
    watcher.stop()


def test_a_clean_leave_is_no_failure(store, sleeper):
    """A neighbour that said that it leaves may end."""
    processes = [own_process(0), replace(own_process(1), pid=sleeper.pid)]
    watcher, ended = watch(store, 0, processes)
    leaver = Watcher(store, 1, processes, patience=FAST, end=Ended())
    leaver.stop()
    sleeper.kill()
    sleeper.wait()
    assert not ended.wait(0.5) and watcher.failure is None
    watcher.stop()


@pytest.mark.parametrize("reader", ["is gone", "reads no more"])
def test_a_lost_launcher_ends_the_process_that_nobody_hears(store, sleeper, monkeypatch, reader):
    """What read its stderr, `tee` or `less` say, may be gone or stopped too: the rank ends all the same."""
    reads, writes = os.pipe()
    if reader == "reads no more":
        os.set_blocking(writes, False)
        with suppress(BlockingIOError):
            while os.write(writes, bytes(4096)):
                pass
        os.set_blocking(writes, True)
    else:
        os.close(reads)
    with open(writes, "w", buffering=1) as deaf:
        monkeypatch.setattr(sys, "stderr", deaf)
        watcher, ended = watch(store, 0, [own_process(0)], parent=sleeper.pid)
        sleeper.kill()
        assert ended.wait(60) and ended.code == 6
        if reader == "reads no more":
            os.close(reads)  # what waits in the pipe ends with an error now
        watcher.stop()
        with suppress(BrokenPipeError):
            deaf.close()


def test_a_lost_launcher_ends_the_process(store, sleeper):
    """Ranks do not outlive their launcher."""
    watcher, ended = watch(store, 0, [own_process(0)], parent=sleeper.pid)
    assert not ended.wait(0.3)
    sleeper.kill()
    assert ended.wait(60) and ended.code == 6
    watcher.stop()


def test_a_lost_store_ends_the_process(capfd):
    """When the store is silent for longer than it may be, the process ends with 6 and says why."""
    served = local_store()
    watcher, ended = watch(served, 0, [own_process(0)], HASTY)
    assert not ended.wait(0.3)
    served._store = None  # the server ends with its last owner
    assert ended.wait(60) and ended.code == 6
    assert "the store did not answer" in capfd.readouterr().err
    watcher.stop()


class Told:
    """Stands for the line to a monitor: tells of one failure, from the moment it is given one."""

    failure: Failure | None = None
    left = False

    def introduce(self, thread):
        self.thread = thread

    def reported(self):
        return self.failure

    def leave(self):
        self.left = True


def test_what_the_monitor_reports_becomes_the_first_failure_of_all(store):
    """Ranks that have no monitor's word hear of it by the store; the process ends with its code."""
    processes = [apart(rank) for rank in range(2)]
    line = Told()
    zero, one = watch(store, 0, processes, monitor=line), watch(store, 1, processes)
    line.failure = Failure(1, "host1", "the job", "PeerError: rank 1 has been frozen", 6)
    for watcher, ended in (zero, one):
        assert ended.wait(60) and ended.code == 6
        assert watcher.failure == line.failure
        watcher.stop()
    assert line.left


def test_a_failure_that_a_rank_reported_comes_before_what_the_monitor_makes_of_it(store):
    """The end of a rank that reported its failure is not taken for the first failure."""
    line = Told()
    zero, ended = watch(store, 0, [apart(rank) for rank in range(2)], monitor=line)
    Watcher(store, 1, [apart(rank) for rank in range(2)], patience=FAST, end=Ended())._report(
        Failure(1, "host1", "epoch", "ValueError: cause", 1)
    )
    line.failure = Failure(1, "host1", "the job", "PeerError: rank 1 died unexpectedly", 6)
    assert ended.wait(60) and ended.code == 1
    zero.stop()


def test_the_monitors_word_counts_when_the_store_does_not_answer(capfd):
    """A rank whose store is lost leaves with what the monitor told, not with a word of its own."""
    served, line = local_store(), Told()
    watcher, ended = watch(served, 0, [apart(rank) for rank in range(2)], HASTY, monitor=line)
    served._store = None  # the server ends with its last owner
    line.failure = Failure(1, "host1", "the job", "PeerError: rank 1 on host1 was silent", 6)
    assert ended.wait(60) and ended.code == 6
    assert "rank 1 on host1 was silent" in capfd.readouterr().err
    watcher.stop()


def test_a_late_rank_says_where_it_is(store):
    """Asked by another rank, a rank that is late tells its phase and the line its main thread is at."""
    processes = [apart(rank) for rank in range(2)]
    patient = replace(FAST, answer=60)
    (zero, _), (one, _) = (watch(store, rank, processes, patient) for rank in range(2))
    with phase.during("group epoch of epoch 3"):
        told = zero.ask([1])
    assert "group epoch of epoch 3" in told[1] and "test_watcher.py:" in told[1], told
    assert Watcher(store, 0, processes, patience=replace(FAST, answer=0.2)).ask([5]) == {}
    zero.stop(), one.stop()


def test_a_connection_that_broke_without_a_known_cause_tells_where_the_others_are(store):
    """Whoever looks for the cause sees in which phase and at which line each other rank was."""
    processes = [apart(rank) for rank in range(2)]
    patient = replace(FAST, answer=60)
    (zero, _), (one, _) = (watch(store, rank, processes, patient) for rank in range(2))
    first = zero.report_failure("epoch", "RuntimeError: Timed out waiting 30 ms", 6, consequence=True)
    assert first.traceback.startswith("rank 1 is in ") and "test_watcher.py:" in first.traceback
    assert first.traceback.endswith("RuntimeError: Timed out waiting 30 ms")
    zero.stop(), one.stop()


@pytest.mark.parametrize("text", ["soon", "1", "nan", "inf"])
def test_a_silence_that_cannot_be_is_refused(text):
    """The environment variable is named."""
    with pytest.raises(UsageError, match="TORCHRELAY_SILENCE_SECS"):
        patience_of({"TORCHRELAY_SILENCE_SECS": text})
    assert patience_of({}).silence == 10 and patience_of({"TORCHRELAY_SILENCE_SECS": "30"}).silence == 30


def test_a_pid_that_is_gone_counts_as_ended(sleeper):
    """A process that ended before it could be watched is told as ended, once."""
    sleeper.kill()
    sleeper.wait()
    lines = LifeLines({"1": sleeper.pid})
    assert lines.ended() == {"1"}
    assert lines.ended() == set()
    lines.close()
