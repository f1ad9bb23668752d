"""Launchers of the kill storm for two hosts: nurseries as agents, which start quickly, or a torchrun on each.

Nurseries end no rank: ranks that survive a kill end by themselves.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from host_ranks import HostNursery, Ranks
from hosts import Host, TwoHosts
from launching import Launch, TrialError, is_running, send, wait_until
from storm_checks import lines_of
from storm_launchers import LEAVE_SECS, kill

IDLE_SECS = 45.0
MEET_SECS = 300.0
"""In which two torchruns meet again, killed and started again every IDLE_SECS."""


class HostPair:
    """Two hosts, and an agent on each for those who ask for them. A context manager."""

    def __init__(self) -> None:
        self.hosts: tuple[Host, ...] = ()
        self.agents: list[HostNursery] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostPair:
        self.hosts = self._stack.enter_context(TwoHosts())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def mend(self) -> None:
        """Start agents that are not there."""
        there = {one.host: one for one in self.agents if is_running(one.pid)}
        self.agents = [there.get(host) or self._agent(host) for host in self.hosts]

    def _agent(self, host: Host) -> HostNursery:
        return self._stack.enter_context(HostNursery(host))


class AcrossHosts:
    """Attempts of a program on both hosts, half of the ranks on each."""

    def __init__(self, pair: HostPair, argv: list[str], ranks: int, logs: Path) -> None:
        self.pair = pair
        self.argv = argv
        self.ranks = ranks
        self.logs = logs
        self.attempt = -1
        self._started = 0
        self._running: Ranks | None = None

    def start(self) -> dict[int, int]:
        """Start all ranks; they end with their agents, as under torchrun."""
        self.pair.mend()
        self.attempt += 1
        self._started = self._starts()
        launch = {"TORCHELASTIC_RUN_ID": "storm", "TORCHELASTIC_RESTART_COUNT": str(self.attempt)}
        self._running = Ranks(self.pair.agents, self.ranks // 2, self.argv, self.logs, extra=launch)
        return dict(enumerate(self._running.pids))

    def targets(self, who: str, ranks: tuple[int, ...]) -> list[int]:
        """The processes that are hit: of a host everything, of an agent itself."""
        at = ranks[0] // (self.ranks // 2)
        if who == "a host":
            return self.pair.hosts[at].pids()
        if who == "an agent":
            return [self.pair.agents[at].pid]
        return [self._pids()[rank] for rank in ranks]

    def finished(self) -> bool:
        """Whether all ranks left with 0; a rank that failed by itself raises TrialError."""
        codes = {rank: self._running.code(rank) for rank in range(self.ranks)} if self._running else {}
        if failed := {rank: code for rank, code in codes.items() if code}:
            raise TrialError(f"ranks failed by themselves (rank: exit code): {failed}; see {self.logs}")
        return all(code == 0 for code in codes.values())

    def after_kill(self) -> None:
        """Wait until the survivors have ended, by themselves once they trained.

        Ranks that have not met yet know nothing of each other: agents would end them.
        """
        trained = self._starts() > self._started
        if not trained:
            for pid in self._pids():
                send(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, self._pids())), LEAVE_SECS, "all ranks to end")

    def stands_still(self) -> bool:
        """Never: these agents do not wait for each other."""
        return False

    def _starts(self) -> int:
        return len(lines_of(self.logs / "starts"))

    def close(self) -> None:
        """End the ranks."""
        for pid in self._pids():
            if is_running(pid):
                send(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return self._running.pids if self._running else []


class TorchrunAcrossHosts:
    """A torchrun on each host, both of one rendezvous; one that has ended is run again for an attempt."""

    def __init__(self, pair: HostPair, argv: list[str], ranks: int, logs: Path, restarts: int) -> None:
        self.pair = pair
        self.ranks = ranks
        self.logs = logs
        self._pids: set[int] = set()
        self._launches: list[Launch] = []
        self._met = self._looked = 0.0  # when a rank was seen last, and looked for
        self._began = 0  # ranks that had come to train when this attempt began
        at = f"{pair.hosts[0].address}:{random.randrange(20000, 30000)}"
        options = ["--nnodes=2", f"--nproc-per-node={ranks // 2}", f"--max-restarts={restarts}"]
        options += ["--rdzv-backend=c10d", "--rdzv-id=storm", f"--rdzv-endpoint={at}"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *options, *argv]

    def start(self) -> dict[int, int]:
        """Wait for the next attempt of the running torchruns; those that are gone are started again."""
        end = time.monotonic() + MEET_SECS
        self._met = time.monotonic()
        while time.monotonic() < end:
            for at, host in enumerate(self.pair.hosts):
                if at >= len(self._launches):
                    self._launches.append(self._launch(host))
                elif self._launches[at].ended():
                    self._launches[at] = self._launch(host)
            found = self._found()
            if len(found) == self.ranks and self._pids.isdisjoint(found.values()):
                self._pids, self._began = set(found.values()), len(lines_of(self.logs / "starts"))
                return found
            if time.monotonic() > self._met + IDLE_SECS:
                self._kill_all()
            time.sleep(0.05)
        raise TrialError(f"{self.ranks} ranks did not start within {MEET_SECS:g} s; see {self.logs}")

    def stands_still(self) -> bool:
        """Whether no rank has run for IDLE_SECS and a torchrun still waits for another; both are killed then.

        Where ranks of one host have finished and others have not, their torchruns wait for each other for
        minutes, deaf to SIGTERM. Schedulers kill a job that stands still.
        """
        now = time.monotonic()
        if now < self._looked + 1 or self.finished():
            return False
        self._looked = now
        if self._found():
            self._met = now
        if now < self._met + IDLE_SECS:
            return False
        self._kill_all()
        return True

    def _kill_all(self) -> None:
        for one in self._launches:
            one.kill()
        kill([pid for pid in self._pids if is_running(pid)])
        self._met = time.monotonic()

    def _launch(self, host: Host) -> Launch:
        return Launch(host.command(self._command), self.logs / f"{host.name}.log")

    def _found(self) -> dict[int, int]:
        return {rank: pid for one in self._launches for rank, pid in one.ranks().items()}

    def targets(self, who: str, ranks: tuple[int, ...]) -> list[int]:
        """The processes that are hit: of a host everything, of an agent its torchrun."""
        at = ranks[0] // (self.ranks // 2)
        if who == "a host":
            return self.pair.hosts[at].pids()
        if who == "an agent":
            return [self._launches[at].process.pid]
        found = self._found()
        return [found[rank] for rank in ranks if rank in found]

    def finished(self) -> bool:
        """Whether both finished with exit code 0; any other end by itself raises TrialError."""
        if not all(one.ended() for one in self._launches):
            return False
        for one in self._launches:
            one.expect(0, 1)
        return True

    def after_kill(self) -> None:
        """Wait until the ranks of this attempt have ended, by themselves or by their torchrun.

        Ranks that have not met yet know nothing of each other, and a torchrun may wait for one that is gone
        for minutes. Schedulers kill a job that has lost a node.
        """
        lost = any(
            not is_running(one.process.pid) for one in self._launches
        )  # its threads may still be ending
        if lost and len(lines_of(self.logs / "starts")) == self._began:
            self._kill_all()
        wait_until(lambda: not any(map(is_running, self._pids)), LEAVE_SECS + 30, "all ranks to end")
        if lost:
            self._kill_all()

    def close(self) -> None:
        """End both, and their ranks."""
        self._kill_all()
