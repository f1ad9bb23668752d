"""Launch on this machine: start a torchrun agent per node and wait for all of them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

from torchrelay.errors import StorageError, UsageError
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


def run_attempt(
    script: Path,
    directory: Path,
    known: Mapping[str, str],
    nodes: int,
    limit_secs: int | None,
    asked: RequestsToEnd,
    stdout: int | None,
) -> tuple[int, str | None]:
    """Start an agent per node and wait for all; no process is left afterwards.

    `known` are environment variables of the attempt; `directory` is that of its logs and notes.
    Returns the exit code (0 if all are 0, else preferably that of an agent whose own rank failed), and the
    signal or time limit that ended the agents, if any.
    """
    directory.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != launcher.NODE_IN},
        **known,
        launcher.DIRECTORY: str(directory),
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
            own = {**environment, launcher.NODE: str(node)}
            # In its own session, so that only this process receives Ctrl-C and forwards it.
            agents.append(
                subprocess.Popen(["/bin/sh", str(script)], env=own, start_new_session=True, stdout=stdout)  # noqa: S603
            )
        late = _wait(agents, asked, limit)
    except OSError as error:
        raise StorageError(f"cannot start {script}: {error.strerror}") from error
    finally:
        for one in agents:
            end_hard(one)
        if any(one.returncode < 0 for one in agents):
            end_left_behind(directory, GRACE_SECS, lambda: asked.hurry)
    codes = [one.returncode for one in agents]
    code = max(codes, key=lambda code: (code > 0, code not in (0, LOST), code != 0))
    return code, asked.name or ("the time limit" if late else None)


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
    children: list[int] = []
    for path in Path(f"/proc/{agent.pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in path.read_text().split()]
    _send(children, signal.SIGKILL)
    agent.kill()
    agent.wait()


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
            attempt = directory / f"attempt_{number}"
            known = {launcher.LAUNCH_ID: launch_id, launcher.ATTEMPT: str(number)}
            stdout = _STDERR if output.json else None  # stdout is used for JSON
            code, by = run_attempt(
                directory / SCRIPT, attempt, known, nodes, request.time_limit, asked, stdout
            )
            found = evidence_of(attempt, well=code == 0, nodes=nodes, asked=by, code=code)
            verdict = verdict_of(found)
            output.notices(report_lines(found, verdict, attempt))
            if not verdict.again or asked.name is not None:
                break
            if number < request.restarts:
                output.notice(f"restarting, {request.restarts - number} of {request.restarts} restarts left")
    ended = {"code": verdict.code, "why": verdict.why, "attempts": number + 1, "directory": str(directory)}
    output.result(ended, [])
    return verdict.code
