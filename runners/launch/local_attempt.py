"""One attempt on this machine: its agents as processes, from their start to the end of the last one."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.records import dataclass
from torchrelay.runners.distributed import launcher_status
from torchrelay.runners.launch.agent_words import GRACE_SECS
from torchrelay.runners.launch.left_behind import end_left_behind
from torchrelay.runners.launch.requests_to_end import RequestsToEnd
from torchrelay.runners.launch.verdict import LOST
from torchrelay.runners.session.stop_requests import END_TIME

_LOOK_SECS = 0.1
_STDERR = 2
_ALONE_SECS = 60.0
"""So long agents may go on after another one has failed; their ranks notice by themselves, much sooner."""
_LAST_SECS = GRACE_SECS + 15.0
"""From a signal to the agents until they are killed with all their ranks; they kill their ranks before."""


@dataclass(frozen=True)
class Attempt:
    """The script of a node, the directory of this attempt's logs and notes, and what tells it from others.

    `apart`: what the ranks print goes to stderr, because stdout is wanted for something else.
    """

    script: Path
    directory: Path
    number: int
    launch_id: str
    apart: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """What the agents ended with; who asked them to end before they did so by themselves."""

    codes: tuple[int, ...]
    asked: str | None

    @property
    def code(self) -> int:
        """0 where all are, else that of an agent whose rank failed by itself, where there is one."""
        return max(self.codes, key=lambda code: (code > 0, code not in (0, LOST), code != 0))


def run_attempt(attempt: Attempt, nodes: int, limit_secs: int | None, asked: RequestsToEnd) -> AttemptEnd:
    """Start an agent per node and wait for all; none of them is left afterwards."""
    attempt.directory.mkdir()
    environment = _environment(attempt, nodes, limit_secs)
    limit = None if limit_secs is None else time.monotonic() + limit_secs  # clocks are set
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(nodes):
            agents.append(_start(attempt, {**environment, launcher_status.NODE: str(node)}))
        watch = _Watch(agents, asked, limit)
        watch.wait()
    finally:
        for one in agents:
            end_hard(one)
        if any(one.returncode < 0 for one in agents):
            end_left_behind(attempt.directory, GRACE_SECS, lambda: asked.hurry)
    return AttemptEnd(tuple(one.returncode for one in agents), asked.name or watch.late)


def _start(attempt: Attempt, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C comes here alone, and is passed on once."""
    try:
        return subprocess.Popen(  # noqa: S603 - the file that was shown
            ["/bin/sh", str(attempt.script)],
            env=environment,
            start_new_session=True,
            stdout=_STDERR if attempt.apart else None,
        )
    except OSError as error:
        raise StorageError(f"cannot start {attempt.script}: {error.strerror}") from error


def _environment(attempt: Attempt, nodes: int, limit_secs: int | None) -> dict[str, str]:
    found = {
        **{name: value for name, value in os.environ.items() if name != launcher_status.NODE_IN},
        launcher_status.DIRECTORY: str(attempt.directory),
        launcher_status.LAUNCH_ID: attempt.launch_id,
        launcher_status.ATTEMPT: str(attempt.number),
        launcher_status.LAUNCHER: str(os.getpid()),
        "TORCHRELAY_LAUNCH_PORT": str(free_port() if nodes > 1 else 0),
    }
    return found if limit_secs is None else {**found, END_TIME: f"{time.time() + limit_secs:.0f}"}


def free_port() -> int:
    """A port that is free now, below those that the system gives to connections."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise StorageError("of 100 ports none is free on 127.0.0.1")


class _Watch:
    """Waits for agents: passes on what is asked, and lets nothing take for ever once one has ended badly."""

    def __init__(
        self, agents: Sequence[subprocess.Popen[bytes]], asked: RequestsToEnd, limit: float | None
    ) -> None:
        self._agents = agents
        self._asked = asked
        self._limit = limit
        self._alone_since: float | None = None
        self._kill_at: float | None = None
        self.late: str | None = None
        """The time limit, where the agents had to be told of it."""

    def wait(self) -> None:
        """Until all have ended, or have to be killed."""
        while self._running():
            self._pass_on()
            now = time.monotonic()
            if self._asked.hurry or (self._kill_at is not None and now >= self._kill_at):
                return
            with suppress(subprocess.TimeoutExpired):
                self._running()[0].wait(_LOOK_SECS)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [one for one in self._agents if one.poll() is None]

    def _pass_on(self) -> None:
        if self._asked.pending is not None:
            number, self._asked.pending = self._asked.pending, None
            self._send(number)
        if self._limit is not None and time.monotonic() >= self._limit:
            self._limit, self.late = None, "the time limit"
            self._send(signal.SIGTERM)
        if any(one.returncode for one in self._agents):
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since >= _ALONE_SECS and self._kill_at is None:
                self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for one in self._running():
            one.send_signal(number)
        self._kill_at = self._kill_at or time.monotonic() + _LAST_SECS


def end_hard(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent that still runs, and its ranks, which have sessions of their own."""
    if agent.poll() is not None:
        return
    for pid in _children(agent.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.kill()
    agent.wait()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found
