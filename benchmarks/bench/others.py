"""W8 and W9: commands of their own, whose output becomes part of the page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
CAP_SECS = 1800.0


def command_of(name: str, scale: float, scratch: Path, *, small: bool) -> Sequence[str]:
    """The command line of a workload."""
    if name == "W8":
        frozen = BENCHMARKS / "frozen.py"
        mib = str(max(16, round(2048 * min(1.0, scale))))
        line = [sys.executable, str(frozen), "--mib", mib, "--where", str(scratch)]
        return [*line, "--saves", "3"] if small else line
    growth = BENCHMARKS / "bench" / "growth.py"
    return [sys.executable, str(growth), "ranks", *(["--small"] if small else [])]


def run_other(name: str, scale: float, scratch: Path, *, small: bool) -> str:
    """What the command printed, or why there is nothing."""
    line = command_of(name, scale, scratch, small=small)
    path = os.pathsep.join([str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    # Its python3 shall be the one that runs all of this.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "PATH": programs}
    cap = 60.0 if small else CAP_SECS
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=cap, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {type(error).__name__} (cap {cap:g} s)"
    told = done.stdout if not done.returncode else f"failed with {done.returncode}: {done.stderr[-500:]}"
    return told.replace(str(scratch), "<scratch>").replace(str(BENCHMARKS.parent), ".")
