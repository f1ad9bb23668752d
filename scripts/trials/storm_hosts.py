"""The kill storm's third launcher: ranks on two hosts with nurseries as agents; nobody ends the survivors."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from host_ranks import HostNursery, Ranks
from hosts import Host, TwoHosts
from launching import TrialError, is_running, send, wait_until
from storm_checks import lines_of
from storm_launchers import LEAVE_SECS


class HostPair:
    """Two hosts with an agent each; an agent that was killed is started again. A context manager."""

    def __init__(self) -> None:
        self.hosts: tuple[Host, ...] = ()
        self.agents: list[HostNursery] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostPair:
        self.hosts = self._stack.enter_context(TwoHosts())
        self.agents = [self._agent(host) for host in self.hosts]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def mend(self) -> None:
        """Start agents that are gone again."""
        self.agents = [one if is_running(one.pid) else self._agent(one.host) for one in self.agents]

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

    def _starts(self) -> int:
        return len(lines_of(self.logs / "starts"))

    def close(self) -> None:
        """End the ranks."""
        for pid in self._pids():
            if is_running(pid):
                send(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return self._running.pids if self._running else []
