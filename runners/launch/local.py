"""Starts the ranks on this machine, an agent of torchrun per node, all of them here; waits for the end."""

from __future__ import annotations

import uuid
from pathlib import Path
from shlex import quote

from torchrelay.errors import UsageError
from torchrelay.runners.launch.agent_words import agent_command, exports
from torchrelay.runners.launch.evidence import evidence_of
from torchrelay.runners.launch.local_attempt import Attempt, run_attempt
from torchrelay.runners.launch.request import LaunchFile, LaunchRequest
from torchrelay.runners.launch.requests_to_end import RequestsToEnd
from torchrelay.runners.launch.telling import told_lines
from torchrelay.runners.launch.verdict import verdict_of
from torchrelay.runners.monitoring.console import Output

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
            attempt = Attempt(
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
