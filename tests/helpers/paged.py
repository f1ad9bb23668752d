"""Runs a page of the documentation in a process that has imported torch, and so do its programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from torchrun import REPOSITORY, clean_environment
from warm import CLIENT, PLACE, server, warmed

# What the programs of pages import: each would take 0.7 s of a processor for it, and a second for the digits.
ALSO = (
    "torchrelay.runners.training.job_runner", "torchrelay.runners.session.local",
    "torchrelay.runners.training.run_loop",
    "torchrelay.checkpoint.load.checkpoint",
    "torchrelay.jobs.data.loader", "torchrelay.tools.cli.main", "torchrelay.jobs.stop",
    "sklearn.datasets",
)  # fmt: skip
_CLIENT = f'exec "{sys.executable}" -I -S "{CLIENT}"'
_PROGRAMS = {
    # torchrun starts ranks with -u; what is no script and no module is the interpreter's own matter.
    "python": f'[ "$1" = -u ] && shift\ncase "$1" in -m|[!-]*) {_CLIENT} "$@";; esac\n'
    f'exec "{sys.executable}" "$@"',
    "torchrun": f'{_CLIENT} -m torch.distributed.run "$@"',
    "torchrelay": f'{_CLIENT} -m torchrelay "$@"',
}


def shell_environment(folder: Path, source: Path = REPOSITORY, *also: str) -> dict[str, str]:
    """What a shell needs for `python`, `torchrun` and `torchrelay` to be warm; they lie beside the folder."""
    programs = folder.with_name(folder.name + ".programs")
    programs.mkdir(exist_ok=True)
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return clean_environment(
        {
            PLACE: server(*also, source=str(source / "src")) if also else server(),
            "PATH": f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHON_EXEC": str(programs / "python"),  # what torchrun starts ranks with
            "PYTHONPATH": str(source / "src"),
        }
    )


def run_page(page: Path, folder: Path, secs: float = 240, source: Path = REPOSITORY) -> dict[str, int]:
    """Run all blocks of a page; returns how many were run, read and excused, or raises AssertionError."""
    folder.mkdir(exist_ok=True)
    env = shell_environment(folder, source, *ALSO)
    for name in ("TORCHRELAY_RUNS", "TORCHRELAY_LOG_EVERY_N_SECS"):
        env.pop(name, None)
    done = subprocess.run(
        warmed([str(REPOSITORY / "scripts/trials/page_run.py"), str(page), str(folder), f"--secs={secs}"]),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=secs + 15,
        check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return dict(json.loads(done.stdout.splitlines()[-1]))
