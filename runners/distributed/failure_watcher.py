"""Report the first failure of any rank to all ranks, and end this process when it must not continue.

A Python handler does not run inside a collective, so a rank that waits there can only be ended from another
thread. Each rank has two daemon threads:

- the *watcher* polls the failure key every half second, and the kernel notifies it when a process of its
  host exits.
- the *guard* measures how long the watcher got no answer from the store: a thread inside a call to an
  unreachable machine cannot do so. It also reads messages of the host monitor, which follows the other hosts
  and detects frozen ranks. It never calls the store, so it always runs unless the process is stopped.

A rank that leaves cleanly announces it; one that exits unannounced has failed.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torchrelay
from torchrelay.errors import DeadlineError, PeerError, StorageError, UsageError
from torchrelay.jobs.runtime import phase, stack_of_main_thread
from torchrelay.records import dataclass
from torchrelay.runners.distributed.host_monitor import CONNECT_SECS, Orders
from torchrelay.runners.distributed.launcher import (
    NOTE_SECS,
    Failure,
    end_process,
    notes,
    write_failure,
    write_stderr_within,
)
from torchrelay.runners.distributed.liveness import (
    JsonLineSocket,
    LifeLines,
    Message,
    ProcessId,
    by_group,
    connect_to,
)
from torchrelay.runners.distributed.rendezvous import Deadline, StoreClient, ranks_text

_START_SECS = 120.0
_PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "from torchrelay.runners.distributed.host_monitor import main; main()"
)
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
"""Variables for the interpreter; others are dropped, because ranks are found by them."""


class MonitorLine:
    """Receive failures from the host monitor; for one thread, but `leave` may come from another."""

    def __init__(self, line: JsonLineSocket, token: str, own: ProcessId) -> None:
        self._line, self._own, self._token, self._left = line, own, token, False
        self._failure: Failure | None = None

    def introduce(self, thread: int) -> None:
        """Send rank, pid and the thread of this process that is always scheduled."""
        hello = {"token": self._token, "rank": self._own.rank, "thread": thread, "phase": phase.show()}
        self._line.send(hello)

    def reported(self) -> Failure | None:
        """Return the failure that the monitor reported, or the loss of the monitor; never waits."""
        for message in self._line.receive():
            if "failure" in message and self._failure is None:
                self._failure = Failure.decode(message["failure"].encode())
        if self._line.closed and self._failure is None and not self._left:
            text = f"PeerError: the host monitor of {self._own.host} is gone (killed, or out of memory)"
            self._failure = Failure(self._own.rank, self._own.host, "the job", text, PeerError.exit_code)
        return self._failure

    def leave(self) -> None:
        """Announce that the exit of this process will not be a failure."""
        self._left = True
        self._line.send({"left": True})


def join_host_monitor(
    store: StoreClient, rank: int, processes: Sequence[ProcessId], master: str, patience: WatcherTimeouts
) -> MonitorLine:
    """Connect to the monitor of this host; the host's lowest rank starts it first.

    `master` is an address of the job's store; the route to it gives this host's own address. Raises PeerError
    if the monitor does not start or answer, DeadlineError if no rank started it.
    """
    groups = list(by_group(processes).values())
    index = next(at for at, ranks in enumerate(groups) if rank in ranks)
    if groups[index][0] == rank:
        hub = _posted(store, 0) if index else None  # what the first host posted
        orders = Orders(
            token=hub["token"] if hub else secrets.token_hex(16),
            host=processes[rank].host,
            pids={one: processes[one].pid for one in groups[index]},
            silence=patience.silence,
            look=patience.look,
            shared=len(groups) > 1 and hub is None,
            hub={key: hub[key] for key in ("addresses", "port", "host", "ranks")} if hub else None,
        )
        posted: Message = {"token": orders.token, "host": orders.host, "ranks": groups[index]}
        posted["port"] = launch_host_monitor(orders)[0]
        posted["addresses"] = _addresses(master, orders.host) if orders.shared else []
        store.put(f"monitor/{index}", json.dumps(posted).encode())
    found = _posted(store, index)
    try:
        line = connect_to("127.0.0.1", found["port"], CONNECT_SECS)
    except OSError as error:
        raise PeerError(f"the host monitor of {processes[rank].host} does not answer: {error}") from error
    return MonitorLine(line, found["token"], processes[rank])


def _posted(store: StoreClient, index: int) -> Message:
    key, deadline = f"monitor/{index}", Deadline(_START_SECS)
    while not store.wait([key], deadline.left):
        if deadline.over:
            raise DeadlineError(
                f"waited {_START_SECS:g} s for the lowest rank of host {index} to start its host monitor"
            )
    return dict(json.loads(store.get([key])[0]))


def launch_host_monitor(orders: Orders) -> tuple[int, int]:
    """Start a host monitor, which shares only stderr with this process; return its port and pid."""
    root = str(Path(torchrelay.__file__).resolve().parents[1])
    command = [sys.executable, "-S", "-I", "-c", _PROGRAM.format(root=root)]
    try:
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise PeerError(f"cannot start the host monitor of {orders.host} ({command[0]}): {error}") from error
    assert process.stdin and process.stdout  # noqa: S101 - they are pipes
    with process.stdin as orders_to, process.stdout as port:
        orders_to.write(json.dumps(asdict(orders)).encode() + b"\n")
        orders_to.flush()
        answer = port.readline()
    if not answer.strip().isdigit():
        raise PeerError(f"the host monitor of {orders.host} did not start (exit code {process.wait(10)})")
    process.returncode = 0  # not waited for: it ends after its last rank
    return int(answer), process.pid


def _addresses(master: str, host: str) -> list[str]:
    """List addresses by which other hosts may reach this one: that of the route to the store, and names."""
    found: list[str] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))
                found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys([*found, master, host]))


_FAILURE = "failure"
_SHOWN = "shown"
_PARENT = "parent"
_ASK = "ask"
_ASKED = 16
LOST_PEER = PeerError.exit_code
_LEAST_SILENCE = 2.0


@dataclass(frozen=True)
class WatcherTimeouts:
    """Timeouts of the watcher in seconds.

    `look`: interval of polls. `silence`: of a host or the store, before it counts as lost. `own_grace`: for
    the failing rank to exit by itself; `peer_grace`: for the others. `blame`: for a root cause to be reported
    before a broken connection counts as the failure. `shown`: for all ranks to print the failure, because a
    launcher ends them after the first exit. `answer`: for late ranks to report what they are doing.
    """

    look: float = 0.5
    silence: float = 10.0
    own_grace: float = 10.0
    peer_grace: float = 1.5
    blame: float = 1.5
    shown: float = 2.0
    answer: float = 3.0


def patience_of(environ: Mapping[str, str]) -> WatcherTimeouts:
    """Return the timeouts of the environment: TORCHRELAY_SILENCE_SECS, 10 by default, at least 2."""
    text = environ.get("TORCHRELAY_SILENCE_SECS", "10")
    try:
        secs = float(text)
    except ValueError:
        secs = 0.0
    if not _LEAST_SILENCE <= secs < float("inf"):
        raise UsageError(
            f"invalid TORCHRELAY_SILENCE_SECS={text!r} in the environment: expected a number of seconds, "
            f"at least {_LEAST_SILENCE:g}"
        )
    return WatcherTimeouts(silence=secs)


class Watcher:
    """Watch one rank of a session; `start` and `stop` it once.

    `processes` are those of all ranks in rank order. `parent` is the launcher's pid if its death must end
    this process too, `monitor` the connection to the host monitor. `hanging()` names a hanging call of this
    process, `astray()` a rank that will never arrive where this one waits. `end` is called from a thread to
    end the process.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        processes: Sequence[ProcessId],
        *,
        parent: int | None = None,
        monitor: MonitorLine | None = None,
        hanging: Callable[[], str | None] = lambda: None,
        astray: Callable[[], str | None] = lambda: None,
        patience: WatcherTimeouts | None = None,
        end: Callable[[int], None] = end_process,
    ) -> None:
        self.patience = patience or WatcherTimeouts()
        self._store, self._rank, self._processes, self._end = store.clone("watch"), rank, processes, end
        self._answered, self._received_at = False, 0.0
        self._lock = threading.Lock()  # guards the store client; held while waiting for the store
        self._deciding, self._leaving, self._stopping = threading.Lock(), threading.Lock(), threading.Event()
        self.failure: Failure | None = None  # the first one of the job that this rank knows
        self._received: Failure | None = None
        self._leave_at: float | None = None
        self._heard, self._deaf = time.monotonic(), False
        group = processes[rank].group
        pids = {str(one.rank): one.pid for one in processes if one.group == group and one.rank != rank}
        self._lines = LifeLines(pids | ({_PARENT: parent} if parent else {}))
        self._monitor = monitor
        self._hanging, self._astray = hanging, astray
        self._threads = [
            threading.Thread(target=target, name=f"torchrelay-{name}", daemon=True)
            for name, target in (("watcher", self._watch), ("guard", self._guard))
        ]

    def start(self) -> Watcher:
        """Start watching."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Announce a clean exit of this rank and stop watching; may be called again."""
        if self._stopping.is_set():
            return
        if self._monitor is not None:
            self._monitor.leave()
        with self._lock, suppress(PeerError):  # without the store no rank can be notified
            self._store.put(f"left/{self._rank}", b"")
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout=5)
        self._lines.close()

    def failure_text(self) -> str | None:
        """Return the first failure in one line, for errors raised by interrupted waits."""
        return self.failure.headline() if self.failure else None

    def report_failure(
        self, task: str, traceback: str, exit_code: int, *, consequence: bool = False
    ) -> Failure | None:
        """Report that this rank failed; return the first failure of the job, None if the store is lost.

        A `consequence`, for example a broken connection, first waits briefly for its cause to be reported.
        All ranks print the first failure and exit; this one is ended after `own_grace`.
        """
        own = self._processes[self._rank]
        deadline = Deadline(self.patience.blame if consequence else 0.0)
        while not deadline.over and self.failure is None:
            time.sleep(0.05)
        if consequence and self.failure is None:
            # a broken connection is explained by what the other ranks are doing
            others = [rank for rank in range(len(self._processes)) if rank != self._rank][:_ASKED]
            where = "".join(f"rank {rank} is in {doing}\n" for rank, doing in self.ask(others).items())
            traceback = f"{where}{traceback}"
        first = self._report(Failure(self._rank, own.host, task, traceback, exit_code))
        shown = Deadline(self.patience.shown)
        with suppress(PeerError):
            while not shown.over:
                with self._lock:
                    if self._store.add(_SHOWN, 0) >= len(self._processes):
                        return first
                time.sleep(0.05)
        return first

    def _report(self, failure: Failure) -> Failure | None:
        try:
            with self._lock:
                first = Failure.decode(self._store.put_once(_FAILURE, failure.encode()))
        except PeerError:
            return None
        self._learn(first)
        return first

    def _learn(self, first: Failure) -> None:
        """Record the first failure and count this rank as having shown it."""
        if self._decide(first):
            with self._lock, suppress(PeerError):
                self._store.add(_SHOWN, 1)

    def _decide(self, first: Failure) -> bool:
        """Record and print a failure if it is the first; return whether it was."""
        with self._deciding:
            if self.failure is not None:
                return False
            self.failure = first
            grace = self.patience.own_grace if first.rank == self._rank else self.patience.peer_grace
            self._leave_at = time.monotonic() + grace
        write_stderr_within(first.report(self._rank))
        write_failure(first.rank, first.host, first.headline(), first.exit_code)
        return True

    # The watcher thread

    def _watch(self) -> None:
        while not self._stopping.is_set():
            ended = self._lines.ended(self.patience.look)
            if self._stopping.is_set():
                return
            try:
                self._look(ended)
                self._heard = time.monotonic()
            except PeerError:  # the guard counts for how long
                self._deaf = True
                self._stopping.wait(self.patience.look)
            self._leave_when_due()

    def _look(self, ended: set[str]) -> None:
        """Check launcher, failure key, processes of this host and loops once."""
        if _PARENT in ended:
            self._leave("its launcher is gone")
        with self._lock:
            known = self._store.has(_FAILURE)
            first = Failure.decode(self._store.get([_FAILURE])[0]) if known else None
            ranks = sorted(int(name) for name in ended - {_PARENT})
            dead = [rank for rank in ranks if first is None and not self._store.has(f"left/{rank}")]
        if first is not None:
            self._learn(first)
        elif dead:
            lost = self._processes[dead[0]]
            names = str(lost) if len(dead) == 1 else f"{ranks_text(dead)} on {lost.host}"
            text = f"PeerError: {names} died unexpectedly (killed, out of memory, or crashed)"
            self._report(Failure(lost.rank, lost.host, "the job", text, LOST_PEER))
        elif self._received is not None:
            self._report(self._received)
        elif (astray := self._astray()) is not None:
            own = self._processes[self._rank]
            text = f"UsageError: {astray}"
            self._report(Failure(self._rank, own.host, "ctx.steps", text, UsageError.exit_code))
        with self._lock:  # another rank may ask what this one is doing, because it waits for it
            if not self._answered and self._store.has(_ASK):
                self._answered = True
                doing = f"{phase.text()}, at {stack_of_main_thread()}"
                self._store.put(f"doing/{self._rank}", doing.encode())

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks what they are doing; ranks that do not answer within seconds are left out."""
        deadline = Deadline(self.patience.answer)
        found: dict[int, str] = {}
        with suppress(PeerError):
            while len(found) < len(ranks) and not deadline.over:
                with self._lock:
                    self._store.put(_ASK, b"")
                    for rank in ranks:
                        if rank not in found and self._store.has(f"doing/{rank}"):
                            found[rank] = self._store.get([f"doing/{rank}"])[0].decode(errors="replace")
                time.sleep(0.05)
        return found

    def _leave_when_due(self) -> None:
        first, due = self.failure, self._leave_at
        if first is not None and due is not None and time.monotonic() >= due:
            self._end_noted(first.headline(), first.exit_code)

    # The guard thread

    def _guard(self) -> None:
        """Run the guard thread. It counts own ticks, so that a pause of the process is not counted."""
        if self._monitor is not None:
            self._monitor.introduce(threading.get_native_id())
        missed, heard, before, silence = 0.0, self._heard, time.monotonic(), self.patience.silence
        while not self._stopping.wait(self.patience.look):
            now = time.monotonic()
            missed, before = missed + min(now - before, 2 * self.patience.look), now
            if self._heard != heard:
                missed, heard = 0.0, self._heard
                self._deaf = False
            self._hear(deaf=self._deaf or missed > self.patience.blame)
            # A moment later than the host monitor, which can name the lost host.
            if missed >= silence + 4 * self.patience.look:
                self._leave(f"the store did not answer for {silence:g} s")
            self._leave_when_due()

    def _hear(self, *, deaf: bool) -> None:
        """Keep a failure from the host monitor, or a hanging call of this process, for the watcher to report.

        It counts directly if the store does not answer, or does not confirm it in time.
        """
        found = self._monitor.reported() if self._monitor is not None else None
        if found is None and (hanging := self._hanging()) is not None:
            own, text = self._processes[self._rank], f"StorageError: {hanging}; it was in {phase.text()}"
            found = Failure(self._rank, own.host, "the storage", text, StorageError.exit_code)
        if found is None or self.failure is not None:
            return
        if self._received is None:
            self._received, self._received_at = found, time.monotonic()
        if deaf or time.monotonic() - self._received_at >= self.patience.blame + 2 * self.patience.look:
            self._decide(found)

    def _leave(self, why: str) -> None:
        write_stderr_within(f"torchrelay: {self._processes[self._rank]} exits: {why}\n")
        self._end_noted(why, LOST_PEER)

    def _end_noted(self, why: str, code: int) -> None:
        """Record the reason, then end the process; one thread at a time, as the other would cut it off."""
        with self._leaving:
            notes.make(why, code, secs=NOTE_SECS)
            self._end(code)
