"""`python -m torchrelay.runners.launch.slurm_end`: the last act of a job of Slurm, without torch.

Tells how the attempt ended, by the run's status.json, and puts the job into the queue again where the run
was preempted. A job that is being cancelled stays so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrelay.runners.distributed.launcher_status import ATTEMPT, DIRECTORY
from torchrelay.runners.launch.evidence import evidence_of
from torchrelay.runners.launch.requeue import idle_starts, wants_requeue, without_end
from torchrelay.runners.launch.telling import told_lines
from torchrelay.runners.launch.verdict import verdict_of
from torchrelay.runners.monitoring.console import Output

_ANSWER_SECS = 60


def main(words: Sequence[str]) -> int:
    """Say how the attempt ended, queue the job again where that helps; returns the code of the job."""
    parser = argparse.ArgumentParser(prog="slurm_end")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--restarts", type=int, required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--asked", required=True)
    chosen = parser.parse_args(words)
    output, directory = Output(), Path(os.environ[DIRECTORY])
    asked = f"SIG{chosen.asked}" if chosen.asked else None
    code = chosen.code
    found = evidence_of(directory, well=code == 0, nodes=chosen.nodes, asked=asked, code=code)
    restart = int(os.environ.get(ATTEMPT) or 0)
    idle = idle_starts(directory.parent, restart)
    verdict = without_end(verdict_of(found), idle, chosen.restarts)
    for line in told_lines(found, verdict, directory):
        output.notice(line)
    if wants_requeue(verdict, restart, chosen.restarts):
        output.notice(_requeue(os.environ["SLURM_JOB_ID"]))
    return verdict.code


def _requeue(job: str) -> str:
    """Put the job into the queue again, unless somebody is ending it; what is to be told of that.

    The very last act: Slurm ends this process for it.
    """
    state = _ask("squeue", "-h", "-j", job, "-o", "%T")
    if state != "RUNNING":
        return f"job {job} is {state or 'unknown to squeue'}: it is not queued again"
    sys.stderr.write(f"torchrelay: job {job} is queued again\n")
    sys.stderr.flush()
    refused = _ask("scontrol", "requeue", job)
    return f"scontrol requeue: {refused or 'done'}"


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
