"""Launch on this machine: start a torchrun agent per node and wait for all of them."""

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
from torchrelay.runners.distributed import launcher
from torchrelay.runners.distributed.launcher import DIRECTORY
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.session.stop_requests import END_TIME
from torchrelay.tools.launch.outcome import LOST, evidence_of, report_lines, verdict_of
from torchrelay.tools.launch.request import GRACE_SECS, LaunchFile, LaunchRequest, agent_command, exports

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_IMPATIENT_SECS = 5.0
"""A second signal within this time is ignored as a repetition of the first one."""


class RequestsToEnd:
    """Record signals: `pending` is not yet sent to the agents, `hurry` is True after a second one."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.pending: int | None = None
        self.hurry = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> RequestsToEnd:
        try:
            self._before = {int(one): signal.signal(one, self._on_signal) for one in _SIGNALS}
        except ValueError:  # not the main thread, which handles signals itself
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self.pending, self._first = signal.Signals(number).name, number, now
        elif now - self._first > _IMPATIENT_SECS:
            self.hurry = True


_LOOK_SECS = 0.1


def end_left_behind(attempt: Path, secs: float, hurry: Callable[[], bool] = lambda: False) -> int:
    """End all ranks of this attempt and the processes they started; returns how many there were.

    They receive SIGTERM, and SIGKILL after `secs` or when `hurry` returns True.
    """
    found = ranks_of(attempt)
    _send(found, signal.SIGTERM)
    end = time.monotonic() + secs
    while (left := ranks_of(attempt)) and time.monotonic() < end and not hurry():
        time.sleep(_LOOK_SECS)
    _send(left, signal.SIGKILL)
    return len(found)


def ranks_of(attempt: Path) -> list[int]:
    """Find the local processes that have the environment of a rank of this attempt."""
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
"""How long agents may run after another one has failed; their ranks usually notice much sooner."""
_LAST_SECS = GRACE_SECS + 15.0
"""Time from a signal to the agents until they are killed; they kill their ranks earlier."""


@dataclass(frozen=True)
class NodeAttempt:
    """An attempt of a node: its script, directory of logs and notes, number and launch id.

    `apart`: redirect the ranks' stdout to stderr, because stdout is used for JSON.
    """

    script: Path
    directory: Path
    number: int
    launch_id: str
    apart: bool = False


def run_attempt(
    attempt: NodeAttempt, nodes: int, limit_secs: int | None, asked: RequestsToEnd
) -> tuple[int, str | None]:
    """Start an agent per node and wait for all; no process is left afterwards.

    Returns the exit code (0 if all are 0, else preferably that of an agent whose own rank failed), and the
    signal or time limit that ended the agents, if any.
    """
    attempt.directory.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != launcher.NODE_IN},
        launcher.DIRECTORY: str(attempt.directory),
        launcher.LAUNCH_ID: attempt.launch_id,
        launcher.ATTEMPT: str(attempt.number),
        launcher.LAUNCHER: str(os.getpid()),
        "TORCHRELAY_LAUNCH_PORT": str(free_port() if nodes > 1 else 0),
    }
    if limit_secs is not None:
        environment[END_TIME] = f"{time.time() + limit_secs:.0f}"
    limit = None if limit_secs is None else time.monotonic() + limit_secs
    agents: list[subprocess.Popen[bytes]] = []
    late = False
    try:
        for node in range(nodes):
            agents.append(_start(attempt, {**environment, launcher.NODE: str(node)}))
        late = _wait(agents, asked, limit)
    finally:
        for one in agents:
            end_hard(one)
        if any(one.returncode < 0 for one in agents):
            end_left_behind(attempt.directory, GRACE_SECS, lambda: asked.hurry)
    codes = [one.returncode for one in agents]
    code = max(codes, key=lambda code: (code > 0, code not in (0, LOST), code != 0))
    return code, asked.name or ("the time limit" if late else None)


def _start(attempt: NodeAttempt, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent in its own session, so that only this process receives Ctrl-C and forwards it."""
    try:
        return subprocess.Popen(  # noqa: S603 - the file that was shown
            ["/bin/sh", str(attempt.script)],
            env=environment,
            start_new_session=True,
            stdout=_STDERR if attempt.apart else None,
        )
    except OSError as error:
        raise StorageError(f"cannot start {attempt.script}: {error.strerror}") from error


def free_port() -> int:
    """Return a free port below the ephemeral port range."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise StorageError("found no free port on 127.0.0.1 in 100 attempts")


def _wait(agents: Sequence[subprocess.Popen[bytes]], asked: RequestsToEnd, limit: float | None) -> bool:
    """Wait for agents, forward signals, and enforce deadlines after a failure or a signal.

    Returns when all agents have ended or must be killed: True if the time limit expired.
    """
    late, alone_since, kill_at = False, None, None
    while running := [one for one in agents if one.poll() is None]:
        now, numbers = time.monotonic(), list[int]()
        if asked.pending is not None:
            numbers.append(asked.pending)
            asked.pending = None
        if limit is not None and now >= limit:
            limit, late = None, True
            numbers.append(signal.SIGTERM)
        if any(one.returncode for one in agents):
            alone_since = alone_since or now
            if now - alone_since >= _ALONE_SECS and kill_at is None:
                numbers.append(signal.SIGTERM)
        for number in numbers:
            for one in running:
                one.send_signal(number)
            kill_at = kill_at or now + _LAST_SECS
        if asked.hurry or (kill_at is not None and now >= kill_at):
            break
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(_LOOK_SECS)
    return late


def end_hard(agent: subprocess.Popen[bytes]) -> None:
    """Kill a running agent and its ranks, which have their own sessions."""
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
    """Return the script that runs once per node. Pure; raises UsageError for `--set` options."""
    if request.options:
        raise UsageError(f"--set {request.options[0][0]}: --local has no options")
    agent = agent_command(request, "127.0.0.1:$TORCHRELAY_LAUNCH_PORT", "$TORCHRELAY_LAUNCH_ID")
    text = f"""#!/bin/sh
# One node of {request.layout}: torchrun with {request.layout.per_node} ranks. \
Run by `torchrelay launch --local`,
# which sets the node, attempt and port.
: "${{TORCHRELAY_LAUNCH_PORT:=0}}" "${{TORCHRELAY_LAUNCH_ID:=$$}}"
cd {quote(str(request.workdir))} || exit
{exports(request)}exec {agent}
"""
    return (LaunchFile(SCRIPT, text, executable=True),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Run attempts up to the last one; returns its exit code. Reports go to stderr."""
    launch_id, nodes = uuid.uuid4().hex, request.layout.nodes
    with RequestsToEnd() as asked:
        for number in range(request.restarts + 1):
            attempt = NodeAttempt(
                directory / SCRIPT, directory / f"attempt_{number}", number, launch_id, output.json
            )
            code, by = run_attempt(attempt, nodes, request.time_limit, asked)
            found = evidence_of(attempt.directory, well=code == 0, nodes=nodes, asked=by, code=code)
            verdict = verdict_of(found)
            output.notices(report_lines(found, verdict, attempt.directory))
            if not verdict.again or asked.name is not None:
                break
            if number < request.restarts:
                output.notice(f"restarting, {request.restarts - number} of {request.restarts} restarts left")
    ended = {"code": verdict.code, "why": verdict.why, "attempts": number + 1, "directory": str(directory)}
    output.result(ended, [])
    return verdict.code
