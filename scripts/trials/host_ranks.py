"""Ranks on two hosts, forked there by a nursery each, in the environment that a launcher would give them."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts import Host
from launching import TrialError, clean_environment

_START_SECS = 120.0


class HostNursery:
    """A process of a host that has imported torch and forks ranks there; a context manager."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.codes: dict[int, int] = {}
        self._told: queue.Queue[list[str]] = queue.Queue()
        program = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
        self._process = subprocess.Popen(
            host.command(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def __enter__(self) -> HostNursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """The nursery's process: every program on the way to it has made way for the next."""
        return self._process.pid

    def fork(self, env: dict[str, str], argv: Sequence[str], log: Path) -> int:
        """Start a rank; return its pid."""
        if self._process.stdin is None:
            raise TrialError("the nursery takes no orders")
        order = {"env": env, "argv": list(argv), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while True:
            told = self._told.get(timeout=_START_SECS)
            if told[0] == "started":
                return int(told[1])
            self.codes[int(told[1])] = int(told[2])

    def code(self, pid: int) -> int | None:
        """The exit code of a rank that has ended."""
        while not self._told.empty():
            told = self._told.get()
            self.codes[int(told[1])] = int(told[2])
        return self.codes.get(pid)

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._told.put(line.split())


class Ranks:
    """One attempt: ranks 0 to n-1 on the first host, the rest on the second; each has a log of its own."""

    def __init__(
        self,
        nurseries: Sequence[HostNursery],
        per_host: int,
        argv: Sequence[str],
        logs: Path,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.per_host = per_host
        self.nurseries = nurseries
        self._extra = dict(extra or {})
        self.logs = [logs / f"rank{rank}.log" for rank in range(per_host * len(nurseries))]
        port = str(random.randrange(20000, 30000))
        self.pids = [
            self._of(rank).fork(self._environment(rank, port), argv, self.logs[rank])
            for rank in range(len(self.logs))
        ]

    def code(self, rank: int) -> int | None:
        """The exit code of a rank; None while it lives."""
        return self._of(rank).code(self.pids[rank])

    def printed(self, rank: int) -> str:
        """What a rank has printed until now."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def on_host(self, host: int) -> list[int]:
        """The ranks of a host by its number."""
        return list(range(host * self.per_host, (host + 1) * self.per_host))

    def _of(self, rank: int) -> HostNursery:
        return self.nurseries[rank // self.per_host]

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank % self.per_host, "GROUP_RANK": rank // self.per_host}
        place |= {"WORLD_SIZE": len(self.logs), "LOCAL_WORLD_SIZE": self.per_host}
        address = {"MASTER_ADDR": self.nurseries[0].host.address, "MASTER_PORT": port}
        return clean_environment({name: str(value) for name, value in place.items()} | address | self._extra)
