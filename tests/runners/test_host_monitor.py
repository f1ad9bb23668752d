"""The monitor of a host, as the process that it is, over ranks that are small processes without torch."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from torchrun import wait_for_the_end_of

from torchrelay.runners.distributed.failure_watcher import launch_host_monitor
from torchrelay.runners.distributed.host_monitor import STRANGERS, Orders
from torchrelay.runners.distributed.liveness import Pulse, StallTimer, connect_to

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "monitored_rank.py"
SILENCE = 1.0


class Rank:
    """A rank that runs, and the lines it prints."""

    def __init__(self, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line.strip())

    def tell(self, *what: object) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def next(self, secs: float = 60) -> str:
        return self._lines.get(timeout=secs)

    def quiet(self, secs: float) -> bool:
        try:
            self._lines.get(timeout=secs)
        except queue.Empty:
            return True
        return False


class Hosts:
    """Hosts with a monitor each, whose ranks do what is asked; everything ends with the block."""

    def __init__(self) -> None:
        self.monitors: list[int] = []
        self.hub: dict[str, object] | None = None
        self._ranks: list[Rank] = []

    def host(self, *what: str, several: bool = False, kill: float = 30.0, hung: float = 75.0) -> list[Rank]:
        ranks = [Rank(one) for one in what]
        pids = {at: rank.pid for at, rank in enumerate(ranks, len(self._ranks))}
        self._ranks += ranks
        name = f"h{len(self.monitors)}"
        shared = several and self.hub is None
        orders = Orders("secret", name, pids, SILENCE, 0.1, shared, self.hub, kill, hung)
        self.port, pid = launch_host_monitor(orders)
        self.monitors.append(pid)
        if several and self.hub is None:
            self.hub = {"addresses": ["127.0.0.1"], "port": self.port, "host": name, "ranks": list(pids)}
        for number, rank in zip(pids, ranks, strict=True):
            rank.tell(self.port, "secret", number)
            assert rank.next() == "ready"
        return ranks

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # with children that wait for it
            rank.process.communicate()
        for pid in self.monitors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_for_the_end_of(self.monitors, 60)


@pytest.fixture
def hosts():
    with Hosts() as made:
        yield made


def test_a_frozen_rank_is_named_with_its_phase_and_killed_in_the_end(hosts):
    """A stopped process is told to the others with its state and last phase, and does not stay for ever."""
    frozen, other = hosts.host("sleep", "sleep", kill=0.5)
    os.kill(frozen.pid, signal.SIGSTOP)
    told = other.next()
    assert told.startswith(f"PeerError: rank 0 (pid {frozen.pid} on h0) has been frozen for"), told
    assert "state T, stopped by a signal" in told and "it was in doing sleep" in told
    assert frozen.process.wait(60) == -signal.SIGKILL


def test_all_ranks_of_a_host_may_be_frozen(hosts):
    """Another host hears of it although no rank of the frozen one can speak."""
    frozen, far = hosts.host("sleep", several=True)[0], hosts.host("sleep", several=True)[0]
    os.kill(frozen.pid, signal.SIGSTOP)
    assert "rank 0" in (told := far.next()) and "has been frozen" in told
    os.kill(frozen.pid, signal.SIGCONT)
    assert "has been frozen" in frozen.next()


@pytest.mark.parametrize("what", ["hold", "compute"])
def test_a_busy_interpreter_is_not_dead(hosts, what):
    """Holding Python's lock for longer than the silence, asleep or computing, alarms nobody."""
    busy, far = hosts.host(what, several=True)[0], hosts.host("sleep", several=True)[0]
    assert busy.next() == "held"
    assert busy.quiet(0.3) and far.quiet(0.3)


def test_a_call_that_cannot_be_interrupted_is_named_then_ended(hosts, capfd):
    """A main thread that the kernel keeps in one call is first only told of; later it is a failure."""
    stuck, other = hosts.host("uninterruptible", "sleep", kill=0.5, hung=2.5)
    told = other.next()
    assert f"rank 0 (pid {stuck.pid} on h0) has been in one system call for" in told, told
    assert "it was in doing uninterruptible" in told
    assert "rank 0" in (warned := capfd.readouterr().err) and "has been in one system call for 1 s" in warned
    assert stuck.process.wait(60) == -signal.SIGKILL


def test_a_rank_that_ends_without_a_word_is_told_and_one_that_leaves_is_not(hosts):
    """The kernel tells of the end; having said that it leaves makes the difference."""
    leaver, killed, other = hosts.host("leave", "sleep", "sleep")
    leaver.tell()
    leaver.process.wait(60)
    assert other.quiet(0.5)
    killed.process.kill()
    assert "rank 1" in (told := other.next()) and "died unexpectedly" in told


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_silent_or_gone_is_named(hosts, lost, number):
    """Whichever host's monitor falls silent or vanishes, the ranks of the other hear which ranks are lost."""
    ranks = [hosts.host("sleep", several=True)[0] for _ in range(2)]
    os.kill(hosts.monitors[lost], number)
    told = ranks[1 - lost].next()
    assert f"host h{lost} with rank {lost} " in told, told
    assert ("was silent for" if number == signal.SIGSTOP else "disconnected unexpectedly") in told


def test_a_host_whose_ranks_left_is_not_missed(hosts):
    """Its monitor says so and ends; the others go on."""
    leaver, far = (hosts.host(what, several=True)[0] for what in ("leave", "sleep"))
    leaver.tell()
    wait_for_the_end_of([hosts.monitors[0]], 60)
    assert far.quiet(2 * SILENCE)


def test_a_first_host_that_cannot_be_reached_is_a_failure_that_says_so(hosts):
    """The message has the addresses and what to do."""
    hosts.hub = {"addresses": ["127.0.0.1"], "port": 1, "host": "alpha", "ranks": [0]}
    told = hosts.host("sleep")[0].next()
    assert "cannot reach the host monitor of alpha at any of 127.0.0.1 (port 1): allow" in told, told


def test_strangers_are_sent_away(hosts):
    """Without the token, with junk or with endless bytes nobody is listened to, and the monitor goes on."""
    rank, other = hosts.host("sleep", "sleep")
    for junk in (
        b'{"token": "guess", "rank": 0, "thread": 1, "phase": ""}\n',
        b"GET / HTTP/1.0\r\n\r\n",
        b"x" * 999_999,
        b"[" * 150_000 + b"\n",
        b'{"rank":' * 30_000 + b"\n",
    ):
        line = connect_to("127.0.0.1", hosts.port, 5)
        line.link.setblocking(True)
        line.link.settimeout(60)
        try:
            line.link.sendall(junk)
            assert line.link.recv(1) == b""
        except ConnectionError:
            pass
        line.close()
    assert other.quiet(0.2)
    rank.process.kill()
    assert "rank 0" in other.next()


def test_strangers_who_say_nothing_take_no_place(hosts):
    """Of many silent connections the oldest are closed, so no number of them uses up a monitor's files."""
    rank, other = hosts.host("sleep", "sleep")
    silent = [socket.create_connection(("127.0.0.1", hosts.port), 5) for _ in range(STRANGERS + 3)]
    try:
        for link in silent[:3]:
            assert link.recv(1) == b""
        assert other.quiet(0.2)
        rank.process.kill()
        assert "rank 0" in other.next()
    finally:
        for link in silent:
            link.close()


def test_stillness_counts_only_what_was_seen_not_to_move():
    """A move and a lost sight begin the count anew."""
    still = StallTimer()
    assert [still.update(Pulse("S", n), 1.0) for n in (5, 5, 5, 6, 6)] == [0, 1, 2, 0, 1]
    assert still.update(None, 1.0) == 0 and still.update(Pulse("S", 6), 1.0) == 0
