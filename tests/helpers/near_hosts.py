"""Real torchrun jobs over two hosts that have disks of their own: two agents, each with a directory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrun import clean_environment, kill, runs
from warm import PLACE, server, warmed

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import storage_of

JOB = Path(__file__).with_name("near_job.py")
WAIT_SECS = 150.0


class Hosts:
    """A run directory or its URL, the disks of the hosts, and what of the job goes when.

    `environment` is what ranks need to come to the URL.
    """

    def __init__(
        self, root: Path, ranks: int = 1, run: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.root, self.ranks, self.environment = root, ranks, environment or {}
        self.run, self.control = run or str(root / "run"), root / "control"
        self.control.mkdir(parents=True)

    def disk(self, host: str) -> Path:
        return self.root / f"disk-{host}"

    def near(self, host: str) -> Path:
        return self.disk(host) / "near"

    @property
    def far_log(self) -> LogView:
        return open_log(storage_of(f"{self.run}/checkpoints", "the far place"), "near")

    def near_log(self, host: str) -> LogView:
        return open_log(LocalStorage(self.near(host)), "near")

    def go(self, *epochs: int) -> None:
        for epoch in epochs:
            (self.control / f"go.{epoch}").touch()

    def hold(self) -> None:
        (self.control / "hold").touch()

    def let_go(self) -> None:
        (self.control / "hold").unlink(missing_ok=True)

    def start(self, epochs: int, hosts: Sequence[str] = "ab", **options: Any) -> Started:
        """Begin the job on hosts in the order of their ranks."""
        return Started(self, epochs, hosts, options)

    def tries(self, host: str) -> set[str]:
        """What lies near."""
        there = self.near(host) / "data"
        return {one.name for one in there.iterdir()} if there.is_dir() else set()


class Started:
    """Agents and ranks; a context manager, so that nothing outlives the test."""

    def __init__(self, hosts: Hosts, epochs: int, names: Sequence[str], options: dict[str, Any]) -> None:
        self.hosts, self.agents = hosts, list[subprocess.Popen[bytes]]()
        for old in hosts.control.glob("pid.*"):
            old.unlink()
        port = _free_port()
        self.outs = [hosts.root / f"{time.time_ns()}-{name}.out" for name in names]
        for number, name in enumerate(names):
            launcher = ["-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={number}"]
            launcher += [
                f"--nproc-per-node={hosts.ranks}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
            ]
            program = warmed([str(JOB), hosts.run, str(epochs), json.dumps(options)])
            hosts.disk(name).mkdir(exist_ok=True)
            near = str(hosts.near(name))
            told = {"NEAR": near, "CONTROL": str(hosts.control), PLACE: server(), **hosts.environment}
            with self.outs[number].open("wb") as out:
                self.agents.append(
                    subprocess.Popen(
                        warmed([*launcher, "--no-python", *program]),
                        env=clean_environment(told),
                        cwd=hosts.root,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def printed(self) -> str:
        return "\n".join(out.read_text(errors="replace") for out in self.outs)

    def until(self, condition: Any) -> None:
        """Wait until a condition holds; what it raises of a log that is being written counts as False."""
        end = time.monotonic() + WAIT_SECS
        while True:
            try:
                if condition():
                    return
            except (OSError, LookupError):
                pass
            assert time.monotonic() < end, self.printed
            assert all(agent.poll() is None for agent in self.agents) or condition(), self.printed
            time.sleep(0.02)

    def end(self) -> list[int]:
        """Wait for the end; the codes of the agents."""
        end = time.monotonic() + WAIT_SECS
        for agent in self.agents:
            try:
                agent.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                printed = self.printed
                self.kill()
                raise AssertionError(f"the job does not end:\n{printed}") from None
        return [agent.returncode for agent in self.agents]

    def kill(self) -> None:
        """SIGKILL to every rank, then to the agents."""
        for one in self.hosts.control.glob("pid.*"):
            kill(int(one.read_text() or 0) or os.getpid() + 2**30)
        for agent in self.agents:
            kill(agent.pid)
            agent.wait(60)
        end = time.monotonic() + WAIT_SECS
        for one in self.hosts.control.glob("pid.*"):
            while runs(int(one.read_text() or 0)):
                assert time.monotonic() < end
                time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
