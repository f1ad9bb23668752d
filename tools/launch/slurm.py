"""Launch on Slurm: one sbatch file, whose job requeues itself when the run was preempted.

`python -m torchrelay.tools.launch.slurm` is the last step of such a job. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from torchrelay.errors import UsageError
from torchrelay.runners.distributed.launcher import ATTEMPT, DIRECTORY, LAUNCHER, NODE, NODE_IN
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.session.stop_requests import END_TIME
from torchrelay.tools.launch.outcome import (
    evidence_of,
    idle_starts,
    report_lines,
    verdict_of,
    wants_requeue,
    without_end,
)
from torchrelay.tools.launch.request import (
    GRACE_SECS,
    LaunchFile,
    LaunchRequest,
    agent_command,
    check_notice,
    exports,
)

SCRIPT = "job.sbatch"
LOG = "job.log"
_OWN = {
    "nodes": "-j", "ntasks": "-j", "ntasks-per-node": "-j", "time": "--time-limit", "job-name": "--name",
    "signal": "--notice", "chdir": "the working directory", "output": "--logs", "error": "--logs",
    "requeue": "--max-restarts", "no-requeue": "--max-restarts", "open-mode": "the launch itself",
    "array": "one launch per element", "wrap": "the command", "export": "--env", "export-file": "--env",
}  # fmt: skip
"""sbatch options that the launch sets itself, and the launch options that set them."""
_OPTION = re.compile(r"[a-z][a-z-]*")
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_LEFT_SECS = 60
"""Part of the notice reserved for the end of the job after the ranks."""
_SHELLS = re.compile(
    r"relay_.*|BASH.*|COMP_.*|DIRSTACK|E?UID|PPID|GROUPS|SHELLOPTS|FUNCNAME|HISTCMD|LINENO|IFS|_"
    r"|S?RANDOM|SECONDS|EPOCH(REALTIME|SECONDS)|OPT(ARG|ERR|IND)|POSIXLY_CORRECT"
)
"""Variables that are special or read-only in the shell of the batch script."""


def files(request: LaunchRequest) -> tuple[LaunchFile, ...]:
    """Return the sbatch file. Pure; raises UsageError for values that cannot be written to it."""
    check_notice(request)
    for name, _ in request.environment:
        if _SHELLS.fullmatch(name):
            raise UsageError(f"--env {name}: reserved by the shell of the batch script; choose another name")
    return (LaunchFile(SCRIPT, f"{_head(request)}\n{_body(request)}", executable=True),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Submit the file with sbatch; returns 0 once the job is queued. Raises UsageError if that is refused."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UsageError("sbatch is not on the PATH: launch from a machine with Slurm")
    words = [sbatch, "--parsable", str(directory / SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - Slurm's own
    if done.returncode != 0:
        raise UsageError(f"sbatch refused {directory / SCRIPT}: {done.stderr.strip() or done.returncode}")
    job = done.stdout.strip().partition(";")[0]
    if not job.isdigit():
        raise UsageError(f"sbatch queued nothing: {(done.stdout + done.stderr).strip() or 'no output'}")
    log = str(directory / LOG)
    output.result({"job": job, "log": log, "directory": str(directory)}, f"job {job}; log: {log}")
    return 0


def _head(request: LaunchRequest) -> str:
    lines = [
        f"--job-name={request.name}",
        f"--nodes={request.layout.nodes}",
        "--ntasks-per-node=1",
        *([f"--time={_clock(request.time_limit)}"] if request.time_limit is not None else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{request.notice}",
        f"--chdir={_word(str(request.workdir))}",
        f"--output={_word(str(request.logs / LOG).replace('%', '%%'))}",
        *map(_setting, request.options),
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)])


def _setting(option: tuple[str, str]) -> str:
    """Return an sbatch option given by `--set`; raises UsageError for options of the launch."""
    name, value = option
    own = next((one for one in _OWN if name and one.startswith(name)), None)  # sbatch accepts prefixes
    if own is not None:
        raise UsageError(f"--set {name}: {own} is set by {_OWN[own]}")
    if not _OPTION.fullmatch(name):
        raise UsageError(f"invalid --set {name!r:.80}: expected the long name of an sbatch option")
    return f"--{name}={_word(value)}" if value else f"--{name}"


def _word(text: str) -> str:
    """Quote a value for an #SBATCH line, which no shell parses."""
    if not text.isprintable():
        raise UsageError(f"invalid value {text!r:.200} in an #SBATCH line: it has control characters")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _clock(secs: int) -> str:
    minutes, secs = divmod(secs, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{secs:02}"


def _body(request: LaunchRequest) -> str:
    grace = max(GRACE_SECS, request.notice - _LEFT_SECS)
    launch_id = "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    endpoint = "${relay_address:-$relay_node}:$relay_port"
    end = f"{quote(request.python)} -m torchrelay.tools.launch.slurm"
    return f"""\
# Written by `torchrelay launch --slurm`: {request.layout}, one agent of torchrun per node.
# Slurm sends USR1 to this script only, {request.notice} s before the end; the ranks then save and exit.
# The script's own variables begin with relay_; all others are passed to the ranks.
unset {LAUNCHER} {NODE} {END_TIME}  # of a launch that submitted this job
{exports(request)}export TORCHRELAY_NOTICE_SECS={grace} {NODE_IN}=SLURM_NODEID
export TORCHRELAY_LAUNCH_ID="slurm.$SLURM_JOB_ID" TORCHRELAY_LAUNCH_ATTEMPT="${{SLURM_RESTART_COUNT:-0}}"
export TORCHRELAY_LAUNCH_DIR={quote(str(request.logs))}/attempt_"$TORCHRELAY_LAUNCH_ATTEMPT"
mkdir -p "$TORCHRELAY_LAUNCH_DIR" || exit 5
if [ -z "${{SLURM_JOB_END_TIME:-}}" ]; then  # before Slurm 23
  relay_end="$(squeue -h -j "$SLURM_JOB_ID" -o %e)"
  case "$relay_end" in
    [0-9]*-*T*) SLURM_JOB_END_TIME="$(date -d "$relay_end" +%s)" && export SLURM_JOB_END_TIME ;;
  esac
fi
relay_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
relay_address="$(scontrol show node "$relay_node" --oneliner | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"
relay_port="$((20000 + (SLURM_JOB_ID * 8 + ${{SLURM_RESTART_COUNT:-0}}) % 10000))"

relay_asked=
relay_step=
relay_ask() {{
  relay_asked="$1"
  # srun forwards USR1, but kills the ranks at once on TERM, which Slurm itself sends to all.
  [ -z "$relay_step" ] || [ "$1" = TERM ] || kill -s "$1" "$relay_step" 2> /dev/null
}}
trap 'relay_ask USR1' USR1
trap 'relay_ask TERM' TERM
srun --kill-on-bad-exit=1 {agent_command(request, endpoint, launch_id, grace)} &
relay_step="$!"
[ -z "$relay_asked" ] || relay_ask "$relay_asked"
while :; do  # a signal interrupts `wait`
  wait "$relay_step"
  relay_code="$?"
  kill -0 "$relay_step" 2> /dev/null || break
done
exec {end} --nodes {request.layout.nodes} --restarts {request.restarts} \\
  --code "$relay_code" --asked "$relay_asked"
"""


_ANSWER_SECS = 60


def main(words: Sequence[str]) -> int:
    """Report how the attempt ended and requeue the job if that helps; returns the exit code of the job."""
    parser = argparse.ArgumentParser(prog="slurm_end")
    for name in ("--nodes", "--restarts", "--code"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--asked", required=True)
    chosen = parser.parse_args(words)
    output, directory = Output(), Path(os.environ[DIRECTORY])
    asked = f"SIG{chosen.asked}" if chosen.asked else None
    code = chosen.code
    found = evidence_of(directory, well=code == 0, nodes=chosen.nodes, asked=asked, code=code)
    restart = int(os.environ.get(ATTEMPT) or 0)
    idle = idle_starts(directory.parent, restart)
    verdict = without_end(verdict_of(found), idle, chosen.restarts)
    output.notices(report_lines(found, verdict, directory))
    if wants_requeue(verdict, restart, chosen.restarts):
        job = os.environ["SLURM_JOB_ID"]
        state = _ask("squeue", "-h", "-j", job, "-o", "%T")
        if state != "RUNNING":  # it is being cancelled
            output.notice(f"job {job} is {state or 'unknown to squeue'} and is not requeued")
        else:
            sys.stderr.write(f"torchrelay: job {job} is requeued\n")
            sys.stderr.flush()
            refused = _ask("scontrol", "requeue", job)  # the last step: Slurm then ends this process
            output.notice(f"scontrol requeue: {refused or 'done'}")
    return verdict.code


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - Slurm's own
            words, capture_output=True, text=True, check=False, timeout=_ANSWER_SECS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return (done.stdout + done.stderr).strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
