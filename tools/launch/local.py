"""Starts the ranks on this machine, an agent of torchrun per node, all of them here; waits for the end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.distributed import launcher_status
from torchrelay.runners.distributed.launcher_status import DIRECTORY
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.session.stop_requests import END_TIME
from torchrelay.tools.launch.outcome import LOST, evidence_of, told_lines, verdict_of
from torchrelay.tools.launch.request import GRACE_SECS, LaunchFile, LaunchRequest, agent_command, exports

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_IMPATIENT_SECS = 5.0
"""A second signal within this time is the first one again."""


class RequestsToEnd:
    """While the block runs SIGTERM, SIGINT and SIGUSR1 ask the launch to end. Mutable; main thread only.

    `pending` is a signal that the agents have not been sent; `hurry` says that somebody asked again, later.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.pending: int | None = None
        self.hurry = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> RequestsToEnd:
        try:
            self._before = {int(one): signal.signal(one, self._hear) for one in _SIGNALS}
        except ValueError:  # not the main thread: whoever has it decides
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self.pending, self._first = signal.Signals(number).name, number, now
        elif now - self._first > _IMPATIENT_SECS:
            self.hurry = True


_LOOK_SECS = 0.1


def end_left_behind(attempt: Path, secs: float, hurry: Callable[[], bool] = lambda: False) -> int:
    """End all processes that a rank of this attempt is or has started; returns how many there were.

    They are asked by SIGTERM, and killed `secs` later, or when there is `hurry`.
    """
    found = ranks_of(attempt)
    _send(found, signal.SIGTERM)
    end = time.monotonic() + secs
    while (left := ranks_of(attempt)) and time.monotonic() < end and not hurry():
        time.sleep(_LOOK_SECS)
    _send(left, signal.SIGKILL)
    return len(found)


def ranks_of(attempt: Path) -> list[int]:
    """The processes of this machine that live with the surroundings of a rank of this attempt."""
    mark = os.fsencode(f"{DIRECTORY}={attempt}")
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            known = path.read_bytes().split(b"\0")
            if mark in known and any(one.startswith(b"LOCAL_RANK=") for one in known):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


_STDERR = 2
_ALONE_SECS = 60.0
"""So long agents may go on after another one has failed; their ranks notice by themselves, much sooner."""
_LAST_SECS = GRACE_SECS + 15.0
"""From a signal to the agents until they are killed with all their ranks; they kill their ranks before."""


@dataclass(frozen=True)
class NodeAttempt:
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


def run_attempt(attempt: NodeAttempt, nodes: int, limit_secs: int | None, asked: RequestsToEnd) -> AttemptEnd:
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


def _start(attempt: NodeAttempt, environment: dict[str, str]) -> subprocess.Popen[bytes]:
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


def _environment(attempt: NodeAttempt, nodes: int, limit_secs: int | None) -> dict[str, str]:
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


SCRIPT = "node.sh"


def files(request: LaunchRequest) -> tuple[LaunchFile, ...]:
    """The script that is run once per node; pure. Raises UsageError for options, of which there are none."""
    if request.options:
        raise UsageError(f"--set {request.options[0][0]}: --local has no options of its own")
    agent = agent_command(request, "127.0.0.1:$TORCHRELAY_LAUNCH_PORT", "$TORCHRELAY_LAUNCH_ID")
    text = f"""#!/bin/sh
# One node of {request.layout}: torchrun with {request.layout.per_node} ranks. \
Run by `torchrelay launch --local`,
# which says which node, attempt and port this is.
: "${{TORCHRELAY_LAUNCH_PORT:=0}}" "${{TORCHRELAY_LAUNCH_ID:=$$}}"
cd {quote(str(request.workdir))} || exit
{exports(request)}exec {agent}
"""
    return (LaunchFile(SCRIPT, text, executable=True),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Run attempts until one is the last; returns its code. What is told goes to stderr."""
    launch_id, nodes = uuid.uuid4().hex, request.layout.nodes
    with RequestsToEnd() as asked:
        for number in range(request.restarts + 1):
            attempt = NodeAttempt(
                directory / SCRIPT, directory / f"attempt_{number}", number, launch_id, output.json
            )
            ended = run_attempt(attempt, nodes, request.time_limit, asked)
            found = evidence_of(
                attempt.directory, well=ended.code == 0, nodes=nodes, asked=ended.asked, code=ended.code
            )
            verdict = verdict_of(found)
            for line in told_lines(found, verdict, attempt.directory):
                output.notice(line)
            if not verdict.again or asked.name is not None:
                break
            if number < request.restarts:
                output.notice(
                    f"starting again, {request.restarts - number} of {request.restarts} restarts left"
                )
    if output.json:
        output.value(
            {"code": verdict.code, "why": verdict.why, "attempts": number + 1, "directory": str(directory)}
        )
    return verdict.code
