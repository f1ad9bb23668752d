"""Which launch this process belongs to, so that a launch that is repeated goes on with the run that it made.

`torchrelay launch` gives an id that is the same in every attempt. Else a launch with an id is that id:
torchrun's (`--rdzv-id`, and of its own making with `--standalone`), or a job step of Slurm. Without one it is
the launcher's process. A plain `python script.py` has none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.distributed.launcher_status import ATTEMPT, LAUNCH_ID


def launch_of(environ: Mapping[str, str] | None = None) -> str:
    """A text that is the same in every attempt of one launch; empty where there is none."""
    env = os.environ if environ is None else environ
    found = read_launch_env(env)
    if env.get(LAUNCH_ID) and found.launched:
        return f"launch {env[LAUNCH_ID]}"
    if found.run_id:
        return f"torchrun {found.run_id}"
    if env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    if found.elastic:
        return f"process {socket.gethostname()} {os.getppid()} {_began(os.getppid())}"
    return ""


def is_restart(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher started its processes before."""
    env = os.environ if environ is None else environ
    return read_launch_env(env).restart_count > 0 or env.get(ATTEMPT, "0") not in ("", "0")


def _began(pid: int) -> str:
    """When a process was started, in ticks of its machine: numbers of processes come again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
