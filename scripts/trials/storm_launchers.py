"""Two ways to keep the ranks of a job coming back: forked at once, or under torchrun and its restarts."""

from __future__ import annotations

import json
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from launching import Launch, TrialError, clean_environment, is_running, send, torchrun, wait_until

START_SECS = 60.0
LEAVE_SECS = 30.0


class Launcher(Protocol):
    """Starts attempts of a program, one after another."""

    def start(self) -> dict[int, int]:
        """Begin the next attempt; the pid of each rank."""

    def targets(self, who: str, ranks: tuple[int, ...]) -> list[int]:
        """The pids of what a strike hits."""

    def finished(self) -> bool:
        """Whether the program ended by itself, with 0 on every rank."""

    def stands_still(self) -> bool:
        """Whether no rank has run for long though the job is not over; it has been killed then."""

    def after_kill(self) -> None:
        """What the launcher does once a rank was killed; returns when all ranks are gone."""

    def close(self) -> None:
        """End what is left."""


class Forked:
    """Ranks forked by a nursery, in the environment that torchrun would give them.

    Rank 0 hosts the store. When a rank dies the others get SIGTERM, as from torchrun.
    """

    def __init__(self, argv: list[str], ranks: int, log: Path) -> None:
        self.argv = argv
        self.ranks = ranks
        self.log = log
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self._told: queue.Queue[list[str]] = queue.Queue()
        self._nursery = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._nursery.stdout or ():
            self._told.put(line.split())

    def start(self) -> dict[int, int]:
        """Fork all ranks."""
        port = free_port()
        self.pids, self.codes = {}, {}
        for rank in range(self.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_PORT": port}
            place["LOCAL_WORLD_SIZE"] = self.ranks
            env = clean_environment({name: str(value) for name, value in place.items()})
            env["MASTER_ADDR"] = "127.0.0.1"
            self._order({"env": env, "argv": self.argv, "log": str(self.log)})
            self.pids[rank] = self._started()
        return self.pids

    def targets(self, who: str, ranks: tuple[int, ...]) -> list[int]:
        """The ranks themselves."""
        return [self.pids[rank] for rank in ranks]

    def _order(self, order: dict[str, object]) -> None:
        if self._nursery.stdin is None:
            raise TrialError("the nursery takes no orders")
        self._nursery.stdin.write(json.dumps(order) + "\n")
        self._nursery.stdin.flush()

    def _started(self) -> int:
        while True:
            told = self._told.get(timeout=START_SECS)
            if told[0] == "started":
                return int(told[1])
            self._note(told)

    def _note(self, told: list[str]) -> None:
        self.codes[int(told[1])] = int(told[2])

    def _hear(self) -> None:
        while not self._told.empty():
            self._note(self._told.get())

    def finished(self) -> bool:
        """Whether all ranks left with 0; a rank that failed by itself raises TrialError."""
        self._hear()
        failed = {rank: self.codes[pid] for rank, pid in self.pids.items() if self.codes.get(pid)}
        if failed:
            raise TrialError(f"ranks failed by themselves (rank: exit code): {failed}; see {self.log}")
        return all(pid in self.codes for pid in self.pids.values())

    def stands_still(self) -> bool:
        """Never: one launcher waits for no other."""
        return False

    def after_kill(self) -> None:
        """End the other ranks."""
        for pid in self.pids.values():
            send(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, self.pids.values())), LEAVE_SECS, "all ranks to end")

    def close(self) -> None:
        """End the ranks and the nursery."""
        for pid in self.pids.values():
            if is_running(pid):
                send(pid, signal.SIGKILL)
        self._nursery.kill()
        self._nursery.wait(10)


class UnderTorchrun:
    """Ranks under torchrun, which restarts them `restarts` times before it is run again itself."""

    def __init__(self, argv: list[str], ranks: int, log: Path, restarts: int) -> None:
        self.command = torchrun(*argv, ranks=ranks, options=[f"--max-restarts={restarts}"])
        self.ranks = ranks
        self.log = log
        self.pids: dict[int, int] = {}
        self._launch: Launch | None = None

    def start(self) -> dict[int, int]:
        """Wait for the next attempt of the running torchrun, or start it again."""
        old = set(self.pids.values())
        end = time.monotonic() + START_SECS
        while time.monotonic() < end:
            if self._launch is None or self._launch.ended():
                self._launch = Launch(self.command, self.log)
            found = self._launch.ranks()
            if len(found) == self.ranks and not old & set(found.values()):
                self.pids = found
                return found
            time.sleep(0.02)
        raise TrialError(f"torchrun did not start {self.ranks} ranks within {START_SECS:g} s; see {self.log}")

    def targets(self, who: str, ranks: tuple[int, ...]) -> list[int]:
        """The ranks themselves."""
        return [self.pids[rank] for rank in ranks]

    def finished(self) -> bool:
        """Whether torchrun finished with exit code 0; any other end by itself raises TrialError."""
        if self._launch is None or not self._launch.ended():
            return False
        self._launch.expect(0, 1)
        return True

    def stands_still(self) -> bool:
        """Never: one launcher waits for no other."""
        return False

    def after_kill(self) -> None:
        """Wait until torchrun has ended the ranks of this attempt."""
        wait_until(lambda: not any(map(is_running, self.pids.values())), LEAVE_SECS + 15, "all ranks to end")

    def close(self) -> None:
        """End torchrun and its ranks."""
        if self._launch is not None:
            self._launch.kill()


def free_port() -> int:
    """A port that no process listens on now, below those that the system gives to connections."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise TrialError("no port is free")


def kill(pids: list[int]) -> bool:
    """SIGKILL processes and see them gone; whether any of them was still there."""
    killed = [is_running(pid) and send(pid, signal.SIGKILL) for pid in pids]
    wait_until(lambda: not any(map(is_running, pids)), LEAVE_SECS, "the end of what was killed")
    return any(killed)
