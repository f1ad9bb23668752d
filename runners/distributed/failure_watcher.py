"""Makes the first failure of any rank known to all, and ends this process when it must not go on.

A Python handler does not run inside a collective, so a rank that waits there can only be ended
from another thread. Each rank has two daemon threads:

- the *watcher* looks at the failure key every half second, and hears from the kernel when a
  process of its host ends.
- the *guard* counts how long the watcher heard nothing from the store: a thread inside a
  call to a machine that lost its network cannot tell that itself. It also listens to the host's
  warden, which follows the other hosts and sees frozen ranks. It never calls the store, so it is
  scheduled every half second as long as the process is not stopped.

A rank that leaves cleanly says so first; one that ends without a word has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torchrelay.errors import PeerError, StorageError, UsageError
from torchrelay.jobs.runtime import phase, stack_of_main_thread
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher_status import (
    NOTE_SECS,
    Failure,
    end_process,
    notes,
    tell_failure,
    tell_stderr_within,
)
from torchrelay.runners.distributed.liveness import LifeLines, ProcessId
from torchrelay.runners.distributed.monitor_client import WardenLine
from torchrelay.runners.distributed.rendezvous import Deadline, StoreClient, ranks_text

_FAILURE = "failure"
_SHOWN = "shown"
_PARENT = "parent"
_ASK = "ask"
_ASKED = 16
LOST_PEER = PeerError.exit_code
_LEAST_SILENCE = 2.0


@dataclass(frozen=True)
class WatcherTimeouts:
    """How long the watcher waits for what, in seconds.

    `look` between two looks; `silence` of a host or of the store before it counts as lost;
    `own_grace` for the failing rank to leave by itself, `peer_grace` for the others;
    `blame` for a root cause to show up before a broken connection is reported as the failure;
    `shown` for all ranks to print the failure, because a launcher ends them when the first leaves;
    `answer` for late ranks to say what they are doing.
    """

    look: float = 0.5
    silence: float = 10.0
    own_grace: float = 10.0
    peer_grace: float = 1.5
    blame: float = 1.5
    shown: float = 2.0
    answer: float = 3.0


def patience_of(environ: Mapping[str, str]) -> WatcherTimeouts:
    """The patience that the environment asks for: TORCHRELAY_SILENCE_SECS, 10 by default, at least 2.

    Raises UsageError where it is no such number.
    """
    text = environ.get("TORCHRELAY_SILENCE_SECS", "10")
    try:
        secs = float(text)
    except ValueError:
        secs = 0.0
    if not _LEAST_SILENCE <= secs < float("inf"):
        raise UsageError(
            f"TORCHRELAY_SILENCE_SECS={text!r} in the environment: expected seconds, "
            f"at least {_LEAST_SILENCE:g}"
        )
    return WatcherTimeouts(silence=secs)


class Watcher:
    """Watches over one rank of a session; `start` and `stop` it once.

    `processes` are those of all ranks in rank order; `parent` is the launcher's pid where its
    death must end this process too, `warden` the line to the host's warden; `hanging()` says
    which call of this process hangs, if one does, `astray()` which rank will not come to where this one
    is. `end` is called from a thread to end the process.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        processes: Sequence[ProcessId],
        *,
        parent: int | None = None,
        warden: WardenLine | None = None,
        hanging: Callable[[], str | None] = lambda: None,
        astray: Callable[[], str | None] = lambda: None,
        patience: WatcherTimeouts | None = None,
        end: Callable[[int], None] = end_process,
    ) -> None:
        self.patience = patience or WatcherTimeouts()
        self._store = store.clone("watch")
        self._rank = rank
        self._processes = processes
        self._end = end
        self._answered = False
        self._told_at = 0.0
        self._lock = threading.Lock()
        """Guards the store client, and is held while the store is waited for."""
        self._deciding, self._leaving, self._stopping = threading.Lock(), threading.Lock(), threading.Event()
        self._first: Failure | None = None
        self._told: Failure | None = None
        self._leave_at: float | None = None
        self._heard, self._deaf = time.monotonic(), False
        group = processes[rank].group
        pids = {str(one.rank): one.pid for one in processes if one.group == group and one.rank != rank}
        self._lines = LifeLines(pids | ({_PARENT: parent} if parent else {}))
        self._warden = warden
        self._hanging, self._astray = hanging, astray
        self._threads = [
            threading.Thread(target=target, name=f"torchrelay-{name}", daemon=True)
            for name, target in (("watcher", self._watch), ("guard", self._guard))
        ]

    def start(self) -> Watcher:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Stop watching, having said that this rank leaves cleanly; may be called again."""
        if self._stopping.is_set():
            return
        self.say_leaving()
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout=5)
        self._lines.close()

    def say_leaving(self) -> None:
        """Tell the others that the end of this process will not be a failure."""
        if self._warden is not None:
            self._warden.leave()
        with self._lock, suppress(PeerError):  # without the store nobody can be told
            self._store.put(_left(self._rank), b"")

    @property
    def failure(self) -> Failure | None:
        """The first failure of the job as far as this rank has heard."""
        return self._first

    def failure_text(self) -> str | None:
        """The first failure in one line, for errors raised by waits that it made pointless."""
        return self._first.headline() if self._first else None

    def report_failure(
        self, task: str, traceback: str, exit_code: int, *, consequence: bool = False
    ) -> Failure | None:
        """Report that this rank failed; return the failure that was first, None when the store is lost.

        A `consequence`, a broken connection say, waits a moment for its cause to be reported.
        All ranks print the first failure and end, this one after `own_grace` if it has not by itself.
        """
        own = self._processes[self._rank]
        deadline = Deadline(self.patience.blame if consequence else 0.0)
        while not deadline.over and self._first is None:
            time.sleep(0.05)
        if consequence and self._first is None:
            # where the others are that a broken or late connection leads to
            others = [rank for rank in range(len(self._processes)) if rank != self._rank][:_ASKED]
            where = "".join(f"rank {rank} is in {doing}\n" for rank, doing in self.ask(others).items())
            traceback = f"{where}{traceback}"
        first = self._report(Failure(self._rank, own.host, task, traceback, exit_code))
        self._await_shown()
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
        if self._decide(first):
            with self._lock, suppress(PeerError):
                self._store.add(_SHOWN, 1)

    def _decide(self, first: Failure) -> bool:
        """Take a failure for the first and print it, unless there was one; whether there was none."""
        with self._deciding:
            if self._first is not None:
                return False
            self._first = first
            grace = self.patience.own_grace if first.rank == self._rank else self.patience.peer_grace
            self._leave_at = time.monotonic() + grace
        tell_stderr_within(first.report(self._rank))
        tell_failure(first.rank, first.host, first.headline(), first.exit_code)
        return True

    def _await_shown(self) -> None:
        deadline = Deadline(self.patience.shown)
        with suppress(PeerError):
            while not deadline.over:
                with self._lock:
                    if self._store.add(_SHOWN, 0) >= len(self._processes):
                        return
                time.sleep(0.05)

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
        if _PARENT in ended:
            self._leave("its launcher is gone", LOST_PEER)
        with self._lock:
            known = self._store.has(_FAILURE)
            first = Failure.decode(self._store.get([_FAILURE])[0]) if known else None
            ranks = sorted(int(name) for name in ended - {_PARENT})
            dead = [rank for rank in ranks if first is None and not self._store.has(_left(rank))]
        if first is not None:
            self._learn(first)
        elif dead:
            self._blame(dead, "ended without a word (killed, out of memory, or crashed)")
        elif self._told is not None:
            self._report(self._told)
        elif (astray := self._astray()) is not None:
            own = self._processes[self._rank]
            text = f"UsageError: {astray}"
            self._report(Failure(self._rank, own.host, "ctx.steps", text, UsageError.exit_code))
        with self._lock:
            self._answer()

    def _answer(self) -> None:
        """Say what this rank is doing when somebody asks, because others wait for it."""
        if not self._answered and self._store.has(_ASK):
            self._answered = True
            self._store.put(_doing(self._rank), f"{phase.text()}, at {stack_of_main_thread()}".encode())

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks what they are doing; whoever cannot answer within seconds is missing in the result."""
        deadline = Deadline(self.patience.answer)
        found: dict[int, str] = {}
        with suppress(PeerError):
            while len(found) < len(ranks) and not deadline.over:
                with self._lock:
                    self._store.put(_ASK, b"")
                    for rank in ranks:
                        if rank not in found and self._store.has(_doing(rank)):
                            found[rank] = self._store.get([_doing(rank)])[0].decode(errors="replace")
                time.sleep(0.05)
        return found

    def _blame(self, ranks: Sequence[int], what: str) -> None:
        lost = self._processes[ranks[0]]
        names = str(lost) if len(ranks) == 1 else f"{ranks_text(list(ranks))} on {lost.host}"
        self._report(Failure(lost.rank, lost.host, "the job", f"PeerError: {names} {what}", LOST_PEER))

    def _leave_when_due(self) -> None:
        first, due = self._first, self._leave_at
        if first is not None and due is not None and time.monotonic() >= due:
            self._end_noted(first.headline(), first.exit_code)

    # The guard thread

    def _guard(self) -> None:
        """Count own ticks, not wall time: after a stop of the whole process nothing was missed."""
        if self._warden is not None:
            self._warden.introduce(threading.get_native_id())
        missed, heard, before, silence = 0.0, self._heard, time.monotonic(), self.patience.silence
        while not self._stopping.wait(self.patience.look):
            now = time.monotonic()
            missed, before = missed + min(now - before, 2 * self.patience.look), now
            if self._heard != heard:
                missed, heard = 0.0, self._heard
                self._deaf = False
            self._hear(deaf=self._deaf or missed > self.patience.blame)
            # A moment later than the warden, which can name the host that is lost.
            if missed >= silence + 4 * self.patience.look:
                self._leave(f"the store was not heard of for {silence:g} s", LOST_PEER)
            self._leave_when_due()

    def _hear(self, *, deaf: bool) -> None:
        """Keep what the warden tells, or which call of this process hangs, for the watcher to report.

        It counts as it is where nothing is heard of the store, or the store does not confirm it in time.
        """
        told = self._warden.heard() if self._warden is not None else None
        if told is None and (hanging := self._hanging()) is not None:
            own, text = self._processes[self._rank], f"StorageError: {hanging}; it was in {phase.text()}"
            told = Failure(self._rank, own.host, "the storage", text, StorageError.exit_code)
        if told is None or self._first is not None:
            return
        if self._told is None:
            self._told, self._told_at = told, time.monotonic()
        if deaf or time.monotonic() - self._told_at >= self.patience.blame + 2 * self.patience.look:
            self._decide(told)

    def _leave(self, why: str, code: int) -> None:
        tell_stderr_within(f"torchrelay: {self._processes[self._rank]} leaves: {why}\n")
        self._end_noted(why, code)

    def _end_noted(self, why: str, code: int) -> None:
        """One thread at a time: the other would end the process while this one's note is being written."""
        with self._leaving:
            notes.make(why, code, secs=NOTE_SECS)
            self._end(code)


def _left(rank: int) -> str:
    return f"left/{rank}"


def _doing(rank: int) -> str:
    return f"doing/{rank}"
